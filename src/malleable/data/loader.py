"""Step-indexed sampling: the samples and the augmentation of step n follow from the seed and n alone.

Draws form one endless stream, epoch after epoch, each a permutation of the data set. Step n takes draws n·B … n·B + B−1
of it, B being the batch over all processes. Neither the number of workers nor of processes, nor where a run was
stopped, changes what a step sees.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from malleable.data.sample import Batch, Sample, SampleDataset, collate


class Draw(NamedTuple):
    """Says which sample a step takes: its place in the data set and the seed of its augmentation."""

    item: int
    seed: int


class StepSampler(Sampler[list[Draw]]):
    """Gives the draws of one process, a list for each step from ``start_step`` to ``steps`` − 1.

    Args:
        length: of the data set.
        batch_size: of a step, over all processes together; process ``rank`` of ``world_size`` gets its equal share.
        steps: where training ends, counted from the start of the first run.
        start_step: the first step to draw, for resuming.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        steps: int,
        *,
        seed: int = 0,
        start_step: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}: the data set is empty")
        if batch_size < 1 or batch_size % world_size:
            raise ValueError(f"batch_size must be a positive multiple of the {world_size} processes, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")
        if not 0 <= start_step <= steps:
            raise ValueError(f"start_step must be in 0..{steps} (steps), got {start_step}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self.length, self.batch_size, self.steps, self.seed = length, batch_size, steps, seed
        self.start_step, self.rank, self.world_size = start_step, rank, world_size
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return self.steps - self.start_step

    def __iter__(self) -> Iterator[list[Draw]]:
        for step in range(self.start_step, self.steps):
            yield self.draws(step)

    def draws(self, step: int) -> list[Draw]:
        """Give what this process draws in ``step``."""
        own = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * own
        return [self._draw(position) for position in range(first, first + own)]

    def _draw(self, position: int) -> Draw:
        epoch, place = divmod(position, self.length)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self.seed, 0, epoch)).permutation(self.length)
        (seed,) = np.random.SeedSequence((self.seed, 1, position)).generate_state(1, np.uint64)
        return Draw(int(self._order[place]), int(seed))


class DrawnDataset(Dataset[Sample]):
    """Gives the sample of a :class:`Draw`, transformed with the randomness of the draw's seed.

    The seed reaches every transform that draws from torch, as torchvision's do. torch's own state is left as it was.
    """

    def __init__(self, dataset: SampleDataset, transform: Callable[[Sample], Sample]) -> None:
        self.dataset, self.transform = dataset, transform

    def __getitem__(self, draw: Draw) -> Sample:
        sample = self.dataset[draw.item]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(draw.seed)  # torch.manual_seed would reset the GPUs' state too
            return self.transform(sample)


def step_loader(
    dataset: SampleDataset,
    transform: Callable[[Sample], Sample],
    batch_size: int,
    steps: int,
    *,
    seed: int = 0,
    start_step: int = 0,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
) -> DataLoader[Batch]:
    """Load the batches of steps ``start_step`` … ``steps`` − 1 for one process, in order.

    Arguments as :class:`StepSampler`; ``transform`` turns a sample into one of fixed size, see ``train_transform``.
    It already shares the work between processes: keep Fabric from adding a distributed sampler
    (``setup_dataloaders(loader, use_distributed_sampler=False)``).
    """
    sampler = StepSampler(
        len(dataset), batch_size, steps, seed=seed, start_step=start_step, rank=rank, world_size=world_size
    )
    return DataLoader(
        DrawnDataset(dataset, transform),  # type: ignore[arg-type]  # batches, not samples, come out
        batch_sampler=sampler,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(0),  # the loader seeds its workers from it, not from torch's own state
        worker_init_fn=_leave_signals,
    )


def _leave_signals(worker: int) -> None:
    """Leave signals, which terminals and schedulers send to all processes, to the one that trains."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
