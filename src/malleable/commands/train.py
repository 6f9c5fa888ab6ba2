"""``malleable train`` trains a network, or goes on with a run."""

from __future__ import annotations

import signal
import sys
from typing import Literal

import torch

from malleable.runs.config import Config, DataConfig, ModelConfig, TrainConfig
from malleable.training.distributed import Stopped
from malleable.training.loop import fit

_DEFAULTS = Config()


def train(
    model: ModelConfig = _DEFAULTS.model,
    data: DataConfig = _DEFAULTS.data,
    train: TrainConfig = _DEFAULTS.train,
    out: str = "runs/run",
    resume: Literal["auto"] | None = None,
    accelerator: str = "auto",
    devices: int | Literal["auto"] = "auto",
    nodes: int = 1,
) -> int:
    """Train a network. The run's folder gets config.yaml, metrics.jsonl, tensorboard/ and checkpoints/.

    Args:
        model: The network
        data: The data and its augmentation
        train: The recipe
        out: the run's folder. One that holds a run is never overwritten, only continued.
        resume: auto goes on from the newest good checkpoint in out, or starts if there is none.
        accelerator: cpu, gpu, cuda or mps; auto takes a GPU if there is one.
        devices: on each machine; auto takes all GPUs, or one CPU process. torchrun and SLURM overrule it.
        nodes: machines. torchrun and SLURM overrule it.
    """
    try:
        config = Config(model, data, train)
        fit(config, out, resume=resume == "auto", accelerator=accelerator, devices=devices, nodes=nodes)
    except Stopped as stopped:
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            print(stopped, file=sys.stderr)
        return 128 + stopped.number
    except KeyboardInterrupt as stopped:
        print("stopped at once; the newest checkpoint is the last one written", file=sys.stderr)
        return 128 + next(iter(stopped.args), signal.SIGINT)
    return 0
