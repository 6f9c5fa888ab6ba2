"""Work over many files with several threads, and how far it has come."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from rich.console import Console

EVERY = 5.0
"""So many seconds pass between two lines of progress where there is no terminal."""

T = TypeVar("T")
R = TypeVar("R")


def parallel_map(function: Callable[[T], R], items: Iterable[T], workers: int) -> Generator[R, None, None]:
    """Apply ``function`` to every item, in order, a few items ahead of the reader.

    Threads, because the decoders of images run outside of Python's lock. Ends early, and promptly, on an error. A
    reader that may leave early closes it, lest a traceback that somebody keeps keeps the threads as well.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    threads = torch.get_num_threads()
    # One core per worker: torch's own threads, one team for each of ours, would only wait for each other.
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    remaining = iter(items)
    try:
        pending: deque[Future[R]] = deque(pool.submit(function, item) for item in islice(remaining, 2 * workers))
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(function, item) for item in islice(remaining, 1))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # for threads that are started later


def available_cores() -> int:
    """Count the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def console() -> Console:
    """Give the one console, on stderr, that progress is shown on, so that bars do not overwrite each other."""
    return plain_console(stderr=True, highlight=False)


def plain_console(**options: Any) -> Console:
    """Make a console that shows text as it is; one whose reader has left raises BrokenPipeError."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:  # called while that error is handled; rich's own ends the process
            raise

    return Plain(markup=False, emoji=False, **options)


@contextmanager
def showing(what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Show how far a piece of work has come: with a bar on a terminal, with a line every few seconds elsewhere.

    Gives what to call after each of its ``total`` parts, None if it has no parts to count. Both go to stderr.
    """
    if console().is_terminal:
        from rich.progress import Progress

        with Progress(console=console(), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
        return
    done, over, began = 0, threading.Event(), time.monotonic()

    def count() -> None:
        nonlocal done
        done += 1

    def tell() -> None:
        while not over.wait(EVERY):
            so_far = "" if total is None else f"{done}/{total}, "
            print(f"{what}: {so_far}{timedelta(seconds=round(time.monotonic() - began))}", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield count
    finally:
        over.set()
        teller.join()
    if total is not None:
        print(f"{what}: {done}/{total}", file=sys.stderr, flush=True)


def with_progress(results: Iterable[R], total: int, what: str) -> Generator[R, None, None]:
    """Pass ``results`` on unchanged, with progress as :func:`showing` gives it; what makes them is closed with it."""
    with closing(results) if isinstance(results, Generator) else nullcontext(), showing(what, total) as advance:
        for result in results:
            yield result
            advance()


class Progress:
    """Shows how far a run has come: a bar on a terminal, a line at every report elsewhere. Both go to stderr.

    ``start`` of the ``total`` steps were made before. ``shown`` is False in all processes but one.
    """

    def __init__(self, total: int, start: int, batch_size: int, shown: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.total, self.batch_size, self.shown = total, batch_size, shown
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Bar(*columns, console=console(), disable=not (shown and console().is_terminal))
        self._task = self._bar.add_task("", total=total, completed=start)
        self.restart()

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def restart(self) -> None:
        """Measure loss and speed anew."""
        self._losses: list[float] = []
        self._since = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what is done in here as training time."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def advance(self, step: int, loss: float) -> None:
        self._losses.append(loss)
        self._bar.update(self._task, completed=step)

    def report(self, step: int, lr: float) -> dict[str, float]:
        """Show and return the mean loss and speed since the last report."""
        seconds = (time.perf_counter() - self._since) / len(self._losses)
        loss, speed = sum(self._losses) / len(self._losses), self.batch_size / seconds
        text = f"loss {loss:.4f}  lr {lr:.2e}  {speed:.1f} images/s"
        self._bar.update(self._task, description=text)
        if self._bar.disable:
            left = timedelta(seconds=round(seconds * (self.total - step)))
            self.say(f"step {step}/{self.total}  {text}  {left} left")
        self.restart()
        return {"loss": loss, "lr": lr, "images_per_second": speed}

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self.shown:
            console().print(text, soft_wrap=True)
