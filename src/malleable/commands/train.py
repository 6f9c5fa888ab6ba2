"""``malleable train`` trains a network, or goes on with a run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Literal

from malleable.runs.config import Config, DataConfig, ModelConfig, TrainConfig
from malleable.runs.folder import RunFolder
from malleable.training.distributed import Stopped, launch
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
        accelerator: cpu, cuda, ...; auto takes a GPU if there is one.
        devices: on each machine; auto takes all GPUs, or one CPU process. torchrun and SLURM overrule it.
        nodes: machines. torchrun and SLURM overrule it.
    """
    config = Config(model, data, train)
    fabric = launch(accelerator, devices, nodes, train.precision)
    try:
        with RunFolder(Path(out), fabric) as folder:
            fit(fabric, config, folder, resume == "auto")
    except Stopped as stopped:
        if fabric.is_global_zero:
            print(stopped, file=sys.stderr)
        return 128 + stopped.number
    except KeyboardInterrupt as stopped:
        print("stopped at once; the newest checkpoint is the last one written", file=sys.stderr)
        return 128 + next(iter(stopped.args), signal.SIGINT)
    return 0
