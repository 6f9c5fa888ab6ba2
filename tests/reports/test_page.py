"""The elements of a report: tables, bars and pictures."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from helpers.markup import Markup
from helpers.outcomes import write_outcome
from malleable.reports.report import Picture, picture, write_report

EVIL = "</style><script>alert('1')</script>&\""


def page(folder: Path, name: str, miou: float | None, title: str = "Title") -> str:
    run = write_outcome(folder / "run", validated=miou, classes=[name])
    write_report({name: [run]}, folder / "r.html", title, intro=title)
    return (folder / "r.html").read_text()


def test_nothing_lets_a_script_through(tmp_path: Path) -> None:
    markup = Markup(page(tmp_path, EVIL, 40.0, EVIL))
    assert not markup.faults
    assert not markup.all("script")
    assert markup.text.count(EVIL) >= 6
    (policy,) = [meta["content"] for meta in markup.all("meta") if "http-equiv" in meta]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_a_table_names_its_rows_and_columns(tmp_path: Path) -> None:
    text = page(tmp_path, "RGB", 40.0)
    table = Markup(text[text.index("<table>") : text.index("</table>") + len("</table>")])
    assert not table.faults
    heads = [cell["scope"] for cell in table.all("th")]
    assert heads == ["col"] * (len(heads) - 1) + ["row"]
    assert len(table.all("td")) == len(heads) - 2
    assert [cell.get("class") for cell in table.all("td")] == [None] * 4 + ["words"] * 2 + [None] * 3
    assert table.text.startswith("All results run mIoU difference pixel accuracy mean accuracy measured on trained")


@pytest.mark.parametrize(("length", "width"), [(12.345, "12.35%"), (-3, "0.00%"), (300, "100.00%")])
def test_bars_are_as_long_as_their_value_and_stay_on_their_track(tmp_path: Path, length: float, width: str) -> None:
    assert set(re.findall(r"--length:(.*?);", page(tmp_path, "RGB", length))) == {width}


def test_a_missing_value_is_a_dash(tmp_path: Path) -> None:
    text = page(tmp_path, "RGB", None)
    assert (
        Markup(text[text.index('<ul class="bars') : text.index("</ul>", text.index('<ul class="bars'))]).text == "RGB –"
    )


def decoded(found: Picture) -> tuple[str, bytes]:
    media, _, data = found.source.removeprefix("data:").partition(";base64,")
    assert (found.name, found.width, found.height) == ("name", 200, 100)
    return media, base64.b64decode(data)


def test_drawings_are_svg_and_pictures_png() -> None:
    drawing, photo = Figure((2, 1)), Figure((2, 1))
    drawing.subplots().plot([1, 2])
    photo.subplots().imshow(np.zeros((4, 4)))
    media, data = decoded(picture("name", drawing))
    assert media == "image/svg+xml"
    assert b"<svg" in data
    media, data = decoded(picture("name", photo))
    assert media == "image/png"
    assert data.startswith(b"\x89PNG")


def test_a_drawing_of_very_many_lines_is_a_png() -> None:
    drawing = Figure((2, 1))
    drawing.subplots().plot(np.random.default_rng(0).random((20, 400)))
    media, data = decoded(picture("name", drawing))
    assert media == "image/png"
    assert len(data) < 150_000
