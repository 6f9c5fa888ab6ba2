"""Processes, signals and random numbers under a training loop."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from lightning_fabric import Fabric
from lightning_fabric.accelerators.cuda import CUDAAccelerator
from lightning_fabric.accelerators.mps import MPSAccelerator
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

_GPUS = {"cuda": CUDAAccelerator, "mps": MPSAccelerator}


def launch(accelerator: str, devices: int | Literal["auto"], nodes: int, precision: Any) -> Fabric:
    """Start Fabric with all its processes. torchrun and SLURM say themselves how many there are."""
    gpus = [name for name, kind in _GPUS.items() if kind.is_available()]
    if accelerator not in ("auto", "cpu", *gpus, *(["gpu"] if gpus else [])):
        here = " and ".join(["cpu", *gpus])
        raise ValueError(f"accelerator must be one that is here, {here}, or auto, got {accelerator!r}")
    if devices != "auto" and devices < 1:
        raise ValueError(f"devices must be at least 1, or auto, got {devices}")
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" in environment:
        devices = int(environment["LOCAL_WORLD_SIZE"])
        nodes = int(environment["WORLD_SIZE"]) // devices
    elif "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        nodes = int(environment.get("SLURM_NNODES", 1))
        devices = int(environment["SLURM_NTASKS"]) // nodes
    if devices not in ("auto", 1) and hasattr(sys, "ps1"):  # a prompt or a notebook
        raise ValueError(
            f"devices={devices} cannot be started from a notebook or a prompt, only by a script or malleable train; "
            "leave devices out, or set it to 1"
        )
    try:
        fabric = Fabric(accelerator=accelerator, devices=devices, num_nodes=nodes, precision=precision)
    except MisconfigurationException as error:
        raise ValueError(f"devices={devices} cannot be had: {error}") from error
    # Fabric would round depth and focal lengths to half precision; autocast converts what may be
    fabric.strategy.precision.convert_input = lambda data: data  # type: ignore[method-assign]
    fabric.launch()
    return fabric


def total(fabric: Fabric, number: Tensor) -> float:
    """Sum a ``number`` of each process."""
    return float(fabric.all_reduce(number, reduce_op="sum"))  # type: ignore[arg-type]


def agreed_signal(fabric: Fabric, received: int) -> int:
    """Give all processes a signal that any of them has ``received``; 0 is none."""
    return int(fabric.all_reduce(torch.tensor(received, device=fabric.device), reduce_op="max"))  # type: ignore[arg-type]


def share_buffers(fabric: Fabric, net: nn.Module) -> None:
    """Give all processes the first one's buffers: on a CPU each has the statistics of its own images."""
    if fabric.world_size > 1:
        for buffer in net.buffers():
            torch.distributed.broadcast(buffer, 0)


def gathered(fabric: Fabric, names: list[str]) -> list[str]:
    """Collect the ``names`` of all processes, in their order."""
    if fabric.world_size == 1:
        return names
    parts: list[list[str]] = [[] for _ in range(fabric.world_size)]
    torch.distributed.all_gather_object(parts, names)
    return [name for part in parts for name in part]


def seed_step(seed: int, step: int, rank: int) -> None:
    """Have what is random in a step, dropout that is, follow from the seed, the step and the process alone."""
    (state,) = np.random.SeedSequence((seed, 2, step, rank)).generate_state(1, np.uint64)  # 0 and 1 belong to the data
    torch.manual_seed(int(state))


class Stopped(Exception):
    """Says that training was left, in all processes, because of the signal ``number``."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class Interruption:
    """Notes SIGINT and SIGTERM for a loop to read when it suits; a second one ends the program at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt(number)
        self.received = number
