"""Scores against a count that knows nothing of the implementation, and against laws."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from malleable.inference.confusion import Confusion

CLASSES = 4
maps = st.lists(
    st.tuples(st.integers(0, CLASSES - 1), st.sampled_from([*range(CLASSES), 255])), min_size=1, max_size=40
)


def count(pairs: list[tuple[int, int]]) -> list[list[int]]:
    table = [[0] * CLASSES for _ in range(CLASSES)]
    for guess, truth in pairs:
        if truth != 255:
            table[truth][guess] += 1
    return table


def tensors(pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    guess, truth = zip(*pairs, strict=True)
    return torch.tensor(guess), torch.tensor(truth)


@given(maps)
def test_every_score_agrees_with_an_independent_count(pairs: list[tuple[int, int]]) -> None:
    confusion = Confusion(CLASSES)
    confusion.update(*tensors(pairs))
    table = count(pairs)
    assert confusion.counts.tolist() == table
    known = [(guess, truth) for guess, truth in pairs if truth != 255]
    ious, accuracies = [], []
    for index in range(CLASSES):
        both = sum(guess == truth == index for guess, truth in known)
        either = sum(index in pair for pair in known)
        own = sum(truth == index for _, truth in known)
        if either:
            ious.append(Fraction(both, either))
            assert float(confusion.iou[index]) == pytest.approx(float(ious[-1]))
        else:
            assert torch.isnan(confusion.iou[index])
        if own:
            accuracies.append(Fraction(both, own))
    if known:
        hits = sum(guess == truth for guess, truth in known)
        assert confusion.pixel_accuracy == pytest.approx(hits / len(known))
        assert confusion.miou == pytest.approx(float(sum(ious) / len(ious)))
        assert confusion.mean_accuracy == pytest.approx(float(sum(accuracies) / len(accuracies)))


@given(maps, st.data())
def test_parts_add_up_to_the_whole(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(pairs)))
    whole, parts = Confusion(CLASSES), Confusion(CLASSES)
    whole.update(*tensors(pairs))
    for part in (pairs[cut:], pairs[:cut]):
        if part:
            parts.update(*tensors(part))
    assert parts.counts.equal(whole.counts)


def test_counts_stay_exact_where_floats_would_not() -> None:
    confusion = Confusion(2)
    confusion.counts[0, 0] = 2**53
    confusion.update(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert int(confusion.counts[0, 0]) == 2**53 + 1


@pytest.mark.parametrize(
    ("guess", "truth", "words"),
    [([0, 4], [0, 1], "predicted must hold classes 0..3, got 0..4"), ([0, 1], [0, 9], "label must hold classes 0..3")],
)
def test_classes_out_of_range_are_named(guess: list[int], truth: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Confusion(CLASSES).update(torch.tensor(guess), torch.tensor(truth))


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\), got \(3, 2\)"):
        Confusion(CLASSES).update(torch.zeros(3, 2), torch.zeros(2, 3))
