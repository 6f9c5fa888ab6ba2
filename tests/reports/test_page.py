"""Elements of a page."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from matplotlib.figure import Figure

from helpers.markup import Markup
from malleable.reports.page import Column, Html, bars, element, page, paragraph, picture, table

EVIL = "</style><script>alert('1')</script>&\""


def test_text_and_attributes_are_escaped() -> None:
    assert element("p", EVIL, title=EVIL).count("<") == 2
    assert Markup(element("p", EVIL, title=EVIL)).tags == [("p", {"title": EVIL})]
    assert Markup(element("p", EVIL)).text == EVIL


def test_html_stays_html_and_none_is_left_out() -> None:
    assert element("p", Html("<b>x</b>"), None, 3, class_="note", id=None) == '<p class="note"><b>x</b>3</p>'


@pytest.mark.parametrize("make", [
    lambda: page(EVIL, paragraph(EVIL)),
    lambda: table(EVIL, Column(EVIL, [EVIL]), Column(EVIL, [EVIL], words=True)),
    lambda: bars({EVIL: (50.0, EVIL)}, {EVIL: "#000"}, named=True),
])  # fmt: skip
def test_nothing_lets_a_script_through(make: object) -> None:
    markup = Markup(make())  # type: ignore[operator]
    assert not markup.faults
    assert not markup.all("script")


def test_a_table_names_its_rows_and_columns() -> None:
    markup = Markup(table("t", Column("run", ["a", "b"]), Column("mIoU", [1, 2]), Column("data", ["x", "y"], True)))
    assert [cell["scope"] for cell in markup.all("th")] == ["col"] * 3 + ["row"] * 2
    assert [cell.get("class") for cell in markup.all("td")] == [None, "words"] * 2
    assert markup.text == "t run mIoU data a 1 x b 2 y"


@pytest.mark.parametrize(("length", "width"), [(12.345, "12.35%"), (-3, "0.00%"), (300, "100.00%")])
def test_bars_are_as_long_as_their_value_and_stay_on_their_track(length: float, width: str) -> None:
    assert f"--length:{width};" in bars({"a": (length, "")}, {"a": "#000"})


def test_a_missing_value_is_a_dash() -> None:
    assert Markup(bars({"a": None}, {"a": "#000"})).text == "a –"


def decoded(html: Html) -> tuple[str, bytes]:
    (image,) = Markup(html).all("img")
    media, _, data = str(image["src"]).removeprefix("data:").partition(";base64,")
    assert image["alt"] == "Title. About."
    return media, base64.b64decode(data)


def test_drawings_are_svg_and_pictures_png() -> None:
    drawing, photo = Figure((2, 1)), Figure((2, 1))
    drawing.subplots().plot([1, 2])
    photo.subplots().imshow(np.zeros((4, 4)))
    media, data = decoded(picture(drawing, "Title", "About."))
    assert media == "image/svg+xml"
    assert b"<svg" in data
    media, data = decoded(picture(photo, "Title", "About."))
    assert media == "image/png"
    assert data.startswith(b"\x89PNG")


def test_a_drawing_of_very_many_lines_is_a_png() -> None:
    drawing = Figure((2, 1))
    drawing.subplots().plot(np.random.default_rng(0).random((20, 400)))
    media, data = decoded(picture(drawing, "Title", "About."))
    assert media == "image/png"
    assert len(data) < 150_000
