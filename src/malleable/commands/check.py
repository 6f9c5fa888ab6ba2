"""``malleable check`` walks through a whole data set, counts what is there and names what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from malleable.data.open import open_dataset, splits_of
from malleable.data.sample import Sample, SampleDataset
from malleable.data.tv_tensors import IGNORE
from malleable.progress import available_cores, parallel_map, with_progress

_SHOWN = 20


@dataclass
class Counts:
    """Counts what the samples of one split hold."""

    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    nearest: float = float("inf")
    farthest: float = 0.0
    pixels: int = 0
    without_depth: int = 0
    blind: int = 0  # samples without any depth
    labels: Tensor = field(default_factory=lambda: torch.zeros(IGNORE + 1, dtype=torch.int64))
    errors: list[str] = field(default_factory=list)

    def add(self, part: Counts) -> None:
        """Count what ``part`` holds, too."""
        self.sizes += part.sizes
        self.nearest, self.farthest = min(self.nearest, part.nearest), max(self.farthest, part.farthest)
        self.pixels += part.pixels
        self.without_depth += part.without_depth
        self.blind += part.blind
        self.labels += part.labels
        self.errors += part.errors

    def lines(self, classes: Sequence[str]) -> Iterable[str]:
        """Say all this in lines to print."""
        if self.sizes:
            sizes = ", ".join(f"{height}×{width} ({count})" for (height, width), count in self.sizes.most_common(5))
            yield f"  sizes (height×width)  {sizes}" + (" …" if len(self.sizes) > 5 else "")
            seen = f"{self.nearest:.2f} to {self.farthest:.2f} m" if self.farthest else "none"
            yield f"  depth                 {seen}, {self.without_depth / self.pixels:.1%} of the pixels invalid"
            yield f"  ignored labels        {int(self.labels[IGNORE]) / self.pixels:.1%} of the pixels"
            if self.blind:
                yield f"  note                  {self.blind} images have no depth at all"
            labelled, width = int(self.labels[:IGNORE].sum()), max(map(len, classes))
            if not labelled:
                yield "  note                  no pixel has a label"
            for index, name in enumerate(classes if labelled else ()):
                yield f"  {index:3d} {name:{width}}  {int(self.labels[index]) / labelled:6.2%}"
        for error in self.errors[:_SHOWN]:
            yield f"  error  {error}"
        if len(self.errors) > _SHOWN:
            yield f"  … and {len(self.errors) - _SHOWN} more errors"


def inspect(sample: Sample) -> Counts:
    """Count what one sample holds."""
    depth, label = sample.depth.as_subclass(Tensor), sample.label.as_subclass(Tensor)
    seen = depth[depth > 0]
    return Counts(
        sizes=Counter([sample.camera.size]),
        nearest=float(seen.min()) if len(seen) else float("inf"),
        farthest=float(seen.max()) if len(seen) else 0.0,
        pixels=label.numel(),
        without_depth=depth.numel() - len(seen),
        blind=int(len(seen) == 0),
        labels=torch.bincount(label.flatten(), minlength=IGNORE + 1),
    )


def count(dataset: SampleDataset, workers: int, what: str) -> Counts:
    """Count over the whole of ``dataset``; a sample that cannot be read adds an error and is left out."""

    def look(index: int) -> Counts:
        try:
            return inspect(dataset[index])
        except (ValueError, OSError) as error:
            return Counts(errors=[str(error)])

    total = Counts()
    with closing(with_progress(parallel_map(look, range(len(dataset)), workers), len(dataset), what)) as parts:
        for part in parts:
            total.add(part)
    return total


def check(dataset: str, split: str | None = None, workers: int | None = None) -> int:
    """Read every sample of a data set; report counts, sizes, depth, classes and every file that is wrong.

    The exit code is 1 if anything is wrong.

    Args:
        dataset: the folder of a data set (one with dataset.json, or Cityscapes' own tree), or rooms, or streets.
        split: only this one.
        workers: threads; all cores by default.
    """
    names = [split] if split is not None else splits_of(dataset)
    ids: dict[str, set[str]] = {}
    wrong = 0
    for name in names:
        try:
            data = open_dataset(dataset, name, strict=False)
        except (ValueError, OSError) as error:
            print(f"{name}\n  error  {error}")
            wrong += 1
            continue
        ids[name] = set(data.ids)
        counts = count(data, workers or available_cores(), f"{data.name}/{name}")
        wrong += len(counts.errors)
        print(f"{data.name}/{name}: {len(data)} samples, {len(counts.errors)} errors")
        print(*counts.lines(data.classes), sep="\n")
    for first, second in combinations(names, 2):
        shared = ids.get(first, set()) & ids.get(second, set())
        if shared:
            print(f"note: {len(shared)} ids are in both {first} and {second}, for example {min(shared)}")
    return int(wrong > 0)
