"""The command line: one verb, one function, its typed arguments. A verb's module is imported only when it is used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

COMMANDS: dict[str, tuple[str, str]] = {
    "check": ("malleable.data.check:check", "look through a data set and name what is wrong in it"),
    "prepare": ("malleable.data.prepare:prepare", "bring a data set's own files into the folder layout"),
}
"""Verb → ("module:function", what it does in one line). The function returns nothing, or an exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``malleable VERB ...`` and return its exit code: 0 done, 1 the work failed, 2 it was called wrongly."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    verb, *rest = arguments
    if verb not in COMMANDS:
        near = get_close_matches(verb, COMMANDS, n=1)
        print(f"malleable: unknown command {verb!r}{f', did you mean {near[0]!r}?' if near else ''}", file=sys.stderr)
        print(usage(), file=sys.stderr)
        return 2
    try:
        return run(verb, rest)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"malleable {verb}: {error}", file=sys.stderr)
        return 1


def usage() -> str:
    width = max(map(len, COMMANDS), default=0)
    verbs = "\n".join(f"  {verb:{width}}  {summary}" for verb, (_, summary) in COMMANDS.items())
    return f"usage: malleable COMMAND ...\n\n{verbs}\n\n'malleable COMMAND --help' lists what a command takes."


def run(verb: str, arguments: Sequence[str]) -> int:
    from jsonargparse import auto_cli

    module, function = COMMANDS[verb][0].split(":")
    command: Callable[..., Any] = getattr(import_module(module), function)
    code = auto_cli(command, args=list(arguments), prog=f"malleable {verb}")
    return int(code or 0)
