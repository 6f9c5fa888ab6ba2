"""The study of teachers and students measures what it says."""

from __future__ import annotations

import copy
import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from malleable.files import read_json

FOLDER = Path(__file__).parents[2] / "studies" / "receptive_fields"
CENTERS = st.lists(st.floats(-10, 10), min_size=3, max_size=7)


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("study")
        for name in ("study", "figures"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def scenes(study: Any) -> Any:
    return study.render(2), study.render(1, first=2)


@given(data=st.data(), wanted=CENTERS)
def test_kernels_may_change_places(study: Any, data: st.DataObject, wanted: list[float]) -> None:
    found = data.draw(st.lists(st.floats(-10, 10), min_size=len(wanted), max_size=len(wanted)))
    inner = data.draw(st.permutations(found[1:-1]))
    assert study.center_errors([found[0], *inner, found[-1]], wanted) == study.center_errors(found, wanted)


@given(data=st.data(), wanted=CENTERS)
def test_kernels_are_matched_as_well_as_can_be(study: Any, data: st.DataObject, wanted: list[float]) -> None:
    found = data.draw(st.lists(st.floats(-10, 10), min_size=len(wanted), max_size=len(wanted)))
    orders = itertools.permutations(found[1:-1])
    best = min(max(abs(a - b) for a, b in zip(order, wanted[1:-1], strict=True)) for order in orders)
    assert study.center_errors(found, wanted)[0] == best


@given(st.lists(st.floats(-20, 20), min_size=3, max_size=7))
def test_ordered_centers_ascend_whatever_the_parameter(study: Any, raw: list[float]) -> None:
    centers = study.Ordered()(torch.tensor(raw, dtype=torch.float64))
    assert (centers.diff() > 0).all()


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=6), st.floats(-5, 5))
def test_ordered_centers_start_where_they_should(study: Any, gaps: list[float], first: float) -> None:
    centers = torch.tensor([first, *gaps], dtype=torch.float64).cumsum(0)
    ordered = study.Ordered()
    torch.testing.assert_close(ordered(ordered.right_inverse(centers)), centers)


def test_a_student_that_starts_as_its_teacher_stays(study: Any, scenes: Any) -> None:
    torch.manual_seed(0)
    teacher = study.new_teacher()
    lessons = study.lessons(teacher, scenes[0], scenes[0].depth)
    path = study.learn(copy.deepcopy(teacher), lessons, study.Condition(multiple=30.0), steps=5)
    assert [point["step"] for point in path] == list(range(6))
    assert all(point["centers"] == teacher.centers.tolist() for point in path)
    assert all(point["temperature"] == teacher.temperature.item() for point in path)


def test_the_teachers_answers_are_standardised(study: Any, scenes: Any) -> None:
    torch.manual_seed(0)
    teacher = study.new_teacher()
    study.standardise(teacher, study.batches(scenes[0], scenes[0].depth))
    answers = torch.cat([y for _, _, y in study.lessons(teacher, scenes[0], scenes[0].depth)])
    torch.testing.assert_close(answers.mean((0, 2, 3)), torch.zeros(study.OUT), atol=1e-5, rtol=0)
    torch.testing.assert_close(answers.std((0, 2, 3)), torch.ones(study.OUT))


def test_holes_are_where_the_sensor_has_none_and_noise_elsewhere(study: Any, scenes: Any) -> None:
    true, noisy, spoiled = (study.seen(scenes[0], sensor) for sensor in ("perfect", "noise", "noise and holes"))
    lost = spoiled == 0
    assert (true > 0).all()
    assert 0 < lost.float().mean() < 0.3
    assert torch.equal(noisy[lost], true[lost])
    assert torch.equal(noisy[~lost], spoiled[~lost])
    assert (noisy[~lost] != true[~lost]).float().mean() > 0.9


@pytest.mark.parametrize("multiple", [1.0, 3.0])
def test_the_first_step_is_as_long_as_the_multiple_says(study: Any, scenes: Any, multiple: float) -> None:
    """Adam's first step has the length of the learning rate in every coordinate."""
    before, after = study.run(study.Condition(multiple=multiple), 0, scenes, steps=1)["path"]
    moved = [abs(a - b) for a, b in zip(after["centers"], before["centers"], strict=True)]
    assert moved == pytest.approx([multiple * study.LR["adam"]] * 5, rel=1e-3)


def test_ordered_centers_learn_too(study: Any, scenes: Any) -> None:
    """The middle center is its own parameter, and moves as a free one does."""
    before, after = study.run(study.Condition(multiple=3.0, ordered=True), 0, scenes, steps=1)["path"]
    assert before["centers"] == pytest.approx([-2, -1, 0, 1, 2], abs=1e-6)
    assert abs(after["centers"][2]) == pytest.approx(3 * study.LR["adam"], rel=1e-3)


def test_the_page_shows_the_recorded_results(study: Any) -> None:
    figures = importlib.import_module("figures")
    page = (FOLDER / "README.md").read_text()
    for table in figures.tables(figures.by_condition(read_json(FOLDER / "results.json")["runs"])):
        assert table in page
