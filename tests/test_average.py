"""Means and spreads, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from malleable.average import Average, decimal, shown


@pytest.mark.parametrize(("values", "sign", "text"), [
    ([], "", "–"),
    ([3.0], "", "3.00"),
    ([1.0, 2.0, 6.0], "", "3.00 ± 2.65"),
    ([1.0, 2.0, 6.0], "+", "+3.00 ± 2.65"),
    ([-1.5, -2.5], "+", "−2.00 ± 0.71"),
    ([-0.001], "", "0.00"),
    ([3.0, math.nan], "", "3.00"),
])  # fmt: skip
def test_averages_as_tables_have_them(values: list[float], sign: str, text: str) -> None:
    assert shown(Average.of(values), sign) == text


def test_runs_without_the_figure_do_not_count() -> None:
    assert Average.of([1.0, math.inf, 3.0]) == (2.0, pytest.approx(2**0.5), 2)


def test_zero_has_no_minus() -> None:
    assert [decimal(value, 3, "+") for value in (-0.00002, -0.002, 0.002)] == ["+0.000", "−0.002", "+0.002"]
