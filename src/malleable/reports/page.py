"""A web page in one file: elements whose text is escaped, tables, bars, figures. It loads nothing and runs nothing."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_LARGE = 150_000  # bytes; a browser takes long over such a drawing
_VOID = {"img", "meta"}


class Html(str):
    """What is HTML already. All other text is escaped when it is put into an element."""


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """``<name attributes>children</name>``; None is left out, ``class_`` is ``class`` and ``http_equiv`` http-equiv."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            words.append(f'{key.rstrip("_").replace("_", "-")}="{escape(str(value))}"')
    start = f"<{' '.join(words)}>"
    return Html(start) if name in _VOID else Html(f"{start}{join(*children)}</{name}>")


def join(*children: object) -> Html:
    """One after the other, escaped if they are not HTML; None is left out."""
    return Html("".join(c if isinstance(c, Html) else escape(str(c)) for c in children if c is not None))


def page(title: str, *body: Html) -> str:
    """A whole page. Its policy forbids scripts and whatever is not in the page itself."""
    style = files("malleable.reports").joinpath("report.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(style)),
    )
    return f"<!doctype html>\n{element('html', head, element('body', *body), lang='en')}\n"


def section(anchor: str, title: str, *content: Html | None) -> Html:
    return element("section", element("h2", title), *content, id=anchor)


def paragraph(*text: object, kind: str | None = None) -> Html:
    return element("p", *text, class_=kind)


def small(*text: object) -> Html:
    """Below what a table's cell says first."""
    return element("span", *text, class_="small")


def code(text: str) -> Html:
    return element("pre", element("code", text), tabindex=0)


class Column(NamedTuple):
    """Of a table: numbers, or ``words``."""

    head: str
    cells: Sequence[object]
    words: bool = False


def table(caption: str, heads: Column, *columns: Column) -> Html:
    """A table that scrolls in itself; ``heads`` are the headings of its rows."""

    def kind(column: Column) -> str | None:
        return "words" if column.words or column is heads else None

    top = (element("th", column.head, scope="col", class_=kind(column)) for column in (heads, *columns))
    rows = (
        element(
            "tr",
            element("th", head, scope="row"),
            *(element("td", cell, class_=kind(column)) for column, cell in zip(columns, cells, strict=True)),
        )
        for head, *cells in zip(heads.cells, *(column.cells for column in columns), strict=True)
    )
    content = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *top)),
        element("tbody", *rows),
    )
    return element("div", content, class_="scroll", tabindex=0, role="group", aria_label=caption)


def bars(values: Mapping[str, tuple[float, str] | None], colours: Mapping[str, str], named: bool = False) -> Html:
    """A bar for each name: its length in percent and what stands at its end, None where there is nothing to show.

    Names are read out; with ``named`` they are seen too.
    """
    lines = []
    for name, entry in values.items():
        length, text = entry or (0.0, "–")
        style = f"--length:{min(max(length, 0), 100):.2f}%;--colour:{colours[name]}"
        lines.append(
            element(
                "li",
                element("span", name, Html(" "), class_="name" if named else "unseen"),
                element("span", element("span", class_="bar", style=style), class_="track", aria_hidden="true"),
                element("span", text, class_="value"),
            )
        )
    return element("ul", *lines, class_="bars named" if named else "bars")


def picture(figure: Figure, title: str, about: str) -> Html:
    """A figure with its caption: a drawing as SVG, or as PNG if it has images in it or is large."""
    with_images = any(axes.images for axes in figure.axes)
    svg = b"" if with_images else _saved(figure, "svg")
    media, content = ("image/png", _png(figure)) if with_images or len(svg) > _LARGE else ("image/svg+xml", svg)
    data = base64.b64encode(content).decode()
    width, height = (round(100 * inches) for inches in figure.get_size_inches())
    image = element(
        "img",
        src=f"data:{media};base64,{data}",
        alt=f"{title}. {about}",
        width=width,
        height=height,
        style=f"--width:{width}px",
    )
    box = element("div", image, class_="scroll", tabindex=0, role="group", aria_label=title)
    return element("figure", box, element("figcaption", element("strong", title), Html(" "), about))


def _png(figure: Figure) -> bytes:
    """In 256 colours: a third of the bytes, and the eye does not see it."""
    file = io.BytesIO()
    Image.open(io.BytesIO(_saved(figure, "png"))).convert("RGB").quantize(256).save(file, "PNG", optimize=True)
    return file.getvalue()


def _saved(figure: Figure, kind: str) -> bytes:
    from malleable.figures.curves import save

    file = io.BytesIO()
    save(figure, file, kind)
    return file.getvalue()
