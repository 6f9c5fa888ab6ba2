"""The figure of faults, whichever of them were tested."""

from __future__ import annotations

from malleable.data.faults import STRESSES
from malleable.figures.stress import stress
from malleable.figures.style import LINES

NAMES = [f"row {number}" for number in range(len(LINES) + 2)]


def test_without_a_fault_of_some_strength_there_is_one_panel_and_a_legend() -> None:
    figure = stress({name: (40.0, {"noise of 2 %": 30.0}) for name in NAMES})
    (panel,) = figure.axes
    assert [label.get_text() for label in panel.get_xticklabels()] == ["no fault", "noise of 2 %"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == NAMES


def test_rows_whose_colour_comes_again_are_hollow_in_every_panel_and_in_the_legend() -> None:
    figure = stress({name: (40.0, {fault.name: 30.0 for fault in STRESSES}) for name in NAMES})
    shown = [*(panel.get_lines() for panel in figure.axes), figure.legends[0].get_lines()]
    for lines in shown:
        faces = [line.get_markerfacecolor() for line in lines]
        assert faces == [*LINES, "white", "white"]
