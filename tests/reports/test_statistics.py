"""Means and spreads, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from malleable.reports.statistics import Average, decimal, shown, shown_p


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


def test_runs_without_the_score_do_not_count() -> None:
    assert Average.of([1.0, math.inf, 3.0]) == (2.0, pytest.approx(2**0.5), 2)


def test_zero_has_no_minus() -> None:
    assert [decimal(value, 3, "+") for value in (-0.00002, -0.002, 0.002)] == ["+0.000", "−0.002", "+0.002"]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.7, 4.303])
def test_p_value_is_the_area_of_both_tails_of_students_distribution(n: int, t: float) -> None:
    """Against the density that PyTorch has, integrated by trapezia."""
    places = torch.linspace(0, t, 20001, dtype=torch.float64)
    density = torch.distributions.StudentT(torch.tensor(n - 1.0, dtype=torch.float64)).log_prob(places).exp()
    tails = 1 - 2 * float(torch.trapezoid(density, places))
    assert Average(-t * 0.7 / math.sqrt(n), 0.7, n).p_value == pytest.approx(tails, abs=1e-8)


@pytest.mark.parametrize(("values", "text"), [
    ([], ""),
    ([3.0], ""),
    ([1.0, 2.0, 6.0], "0.188"),
    ([-1.0, 1.0], "1.000"),
    ([2.0, 2.0001, 1.9999], "< 0.001"),
    ([2.0, 2.0, 2.0], ""),
])  # fmt: skip
def test_p_values_as_tables_have_them(values: list[float], text: str) -> None:
    assert shown_p(Average.of(values)) == text


@pytest.mark.parametrize(("n", "quantile"), [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (10, 2.262), (31, 2.042)])
def test_intervals_reach_as_far_as_tables_of_students_distribution_say(n: int, quantile: float) -> None:
    interval = Average(3.0, 0.7, n).interval
    reach = quantile * 0.7 / math.sqrt(n)
    assert interval == pytest.approx((3 - reach, 3 + reach), rel=1e-3)


def test_an_interval_ends_where_p_is_a_twentieth() -> None:
    interval = Average(2.0, 1.0, 4).interval
    assert interval is not None
    assert Average(2.0 - interval[0], 1.0, 4).p_value == pytest.approx(0.05)


@pytest.mark.parametrize("values", [[3.0], [2.0, 2.0]])
def test_without_a_p_value_there_is_no_interval(values: list[float]) -> None:
    average = Average.of(values)
    assert average is not None
    assert average.interval is None
