import os

# Some virtual machines announce AMX and then trap on it. Set before torch loads oneDNN.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import settings

settings.register_profile("unhurried", settings(), deadline=None)  # a busy machine is no failure
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def reproducible() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_worker() -> None:
    torch.set_num_threads(1)
