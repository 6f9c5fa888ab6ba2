"""Averages a score over several runs, and tells how far they differ."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import mean, stdev
from typing import NamedTuple


class Average(NamedTuple):
    """Holds the mean over ``n`` runs; ``spread`` is their sample standard deviation, None for a single run."""

    mean: float
    spread: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Average | None:
        """Average the finite ones of ``values``; None if there are none."""
        kept = [value for value in values if math.isfinite(value)]
        return cls(mean(kept), stdev(kept) if len(kept) > 1 else None, len(kept)) if kept else None

    @property
    def p_value(self) -> float | None:
        """Tell how often a mean at least as far from zero would arise if the true one were zero: the two-sided t-test.

        None for a single run, and for runs without any spread, of which the test cannot tell anything.
        """
        if not self.spread:
            return None
        freedom = self.n - 1
        return _tails(math.atan2(abs(self.mean) * math.sqrt(self.n), self.spread * math.sqrt(freedom)), freedom)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Tell between which two the true mean lies with 95 % confidence; None where there is no p-value."""
        if not self.spread:
            return None
        freedom = self.n - 1
        low, high = 0.0, math.pi / 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _tails(middle, freedom) > 0.05 else (low, middle)
        reach = math.tan(low) * math.sqrt(freedom) * self.spread / math.sqrt(self.n)
        return self.mean - reach, self.mean + reach


def _tails(angle: float, freedom: int) -> float:
    """Compute the area below both tails of Student's distribution beyond ± tan(angle) · √freedom.

    With a whole number of degrees of freedom it has a closed form (Abramowitz and Stegun, Handbook of Mathematical
    Functions, 26.7.3 and 26.7.4).
    """
    odd = freedom % 2
    term, total = math.cos(angle) ** odd, 0.0
    for place in range(1 + odd, freedom, 2):
        total += term
        term *= place / (place + 1) * math.cos(angle) ** 2
    inside = math.sin(angle) * total
    return max(1 - (2 / math.pi * (angle + inside) if odd else inside), 0.0)


def shown(average: Average | None, sign: str = "") -> str:
    """Write it as tables do: "12.91 ± 0.36", "12.91" of one run, "–" of none. ``sign`` "+" shows it on gains too."""
    if average is None:
        return "–"
    text = decimal(average.mean, 2, sign)
    return text if average.spread is None else f"{text} ± {average.spread:.2f}"


def shown_p(average: Average | None) -> str:
    """Write its p-value as tables have it: "0.034", "< 0.001", and nothing where there is none."""
    p = average and average.p_value
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def decimal(value: float, digits: int, sign: str = "") -> str:
    """Write ``value`` with ``digits`` behind the point; ``sign`` "+" shows it on gains too."""
    return f"{round(value, digits) + 0.0:{sign}.{digits}f}".replace("-", "−")  # + 0.0: zero without a minus


def number(value: float | None, digits: int = 2, sign: str = "") -> str:
    """Write ``value`` as :func:`decimal` does, and a dash where there is none."""
    return "–" if value is None or math.isnan(value) else decimal(value, digits, sign)
