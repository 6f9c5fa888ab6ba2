"""Turns the docstrings' form into the one that the site's reference is made from."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Takes roles like ``:func:`` off names, and calls the section ``Example`` as the reader of sections does."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            plain = re.sub(r":(?:func|class|meth|mod):`([^`]+)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", plain, flags=re.MULTILINE)
