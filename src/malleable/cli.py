"""The command line calls a function for each verb, with typed arguments, and imports only the one that is used."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TextIO, get_type_hints

from malleable.runs.settings import UsageError, explained, nearest, resolve

COMMANDS: dict[str, str] = {
    "bench": "measure what the layers cost on this machine",
    "doctor": "run every engine on this machine's devices against the plain one",
    "cost": "parameters and multiply-adds, beside the paper's Table 1",
    "train": "train a network, or go on with a run",
    "study": "train all rows of a comparison with several seeds, and tabulate them",
    "check": "look through a data set and name what is wrong in it",
    "evaluate": "mIoU and accuracies of a trained network on a data set",
    "predict": "label images with a trained network",
    "explore": "open a page that shows which neighbours a layer takes, and what networks make of them",
    "figures": "draw what a trained network has learned and what it does",
    "export": "write a trained network as ONNX or as a torch.export program",
    "report": "show runs beside each other in one HTML file",
    "push": "put a trained network into a folder or on the Hugging Face hub",
    "pull": "get a trained network from the Hugging Face hub or a folder",
    "prepare": "bring a data set's own files into the folder layout",
}
"""Verb → what it does in one line. ``commands/<verb>.py`` has its function, which returns nothing or an exit code."""

_UNREAD = 128 + 13  # the shell's for a program that SIGPIPE ended
_STOPPED = 128 + 2  # and SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``malleable VERB ...`` and return its exit code: 0 done, 1 the work failed, 2 it was called wrongly.

    Where nobody reads on what it prints, as after ``| head``, it ends without a word and returns 141, as others do.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # of a terminal or file that cannot show every letter, or of nothing
            stream.reconfigure(errors="replace")
    try:
        try:
            return _main(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            _forget(stream)
        return _UNREAD


def _forget(stream: TextIO) -> None:
    """Drop what nobody will read, lest Python complain of it as it ends; a stream that is read keeps it."""
    try:
        stream.flush()
    except BrokenPipeError:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), stream.fileno())


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        verbs = "\n".join(f"  {verb:{max(map(len, COMMANDS))}}  {summary}" for verb, summary in COMMANDS.items())
        print(f"usage: malleable COMMAND ...\n\n{verbs}\n\n'malleable COMMAND --help' lists what a command takes.")
        return 0 if arguments else 2
    verb, *rest = arguments
    if verb not in COMMANDS:
        question = nearest(verb, COMMANDS)
        print(f"malleable: unknown command {verb!r}{question} ('malleable --help' lists them)", file=sys.stderr)
        return 2
    try:
        with one_line_warnings():
            return run(verb, rest)
    except UsageError as error:
        print(f"malleable {verb}: {error} ('malleable {verb} --help' lists what it takes)", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        print(f"malleable {verb}: stopped", file=sys.stderr)
        return _STOPPED
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        wordless = "there is not enough memory" if isinstance(error, MemoryError) else type(error).__name__
        print(f"malleable {verb}: {str(error) or wordless}", file=sys.stderr)
        return 1


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Show warnings as sentences for the user, who need not know the line of code that gave them."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {' '.join(str(message).split())}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def run(verb: str, arguments: Sequence[str]) -> int:
    """Call the function of ``verb`` with ``arguments`` as the command line gives them, and return its exit code."""
    from jsonargparse import ArgumentError, auto_cli

    command: Callable[..., Any] = getattr(import_module(f"malleable.commands.{verb}"), verb)
    types = get_type_hints(command)
    try:
        code = auto_cli(command, args=resolve(arguments, types), prog=f"malleable {verb}", exit_on_error=False)
    except ArgumentError as error:
        raise explained(error, types) from error
    return int(code or 0)
