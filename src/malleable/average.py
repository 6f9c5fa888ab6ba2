"""A figure over several runs: its mean and how far they differ."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import mean, stdev
from typing import NamedTuple


class Average(NamedTuple):
    """Of ``n`` runs; ``spread`` is the sample standard deviation, None for a single run."""

    mean: float
    spread: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Average | None:
        """Of the finite ones of ``values``; None if there are none."""
        kept = [value for value in values if math.isfinite(value)]
        return cls(mean(kept), stdev(kept) if len(kept) > 1 else None, len(kept)) if kept else None


def shown(average: Average | None, sign: str = "") -> str:
    """As tables have it: "12.91 ± 0.36", "12.91" of a single run, "–" of none. ``sign`` "+" shows it on gains too."""
    if average is None:
        return "–"
    text = decimal(average.mean, 2, sign)
    return text if average.spread is None else f"{text} ± {average.spread:.2f}"


def decimal(value: float, digits: int, sign: str = "") -> str:
    """``value`` with ``digits`` behind the point; ``sign`` "+" shows it on gains too."""
    return f"{round(value, digits) + 0.0:{sign}.{digits}f}".replace("-", "−")  # + 0.0: zero without a minus
