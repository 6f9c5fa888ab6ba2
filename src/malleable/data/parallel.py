"""Work over many files with several threads, and how far it has come."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def parallel_map(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """``function`` of every item, in order, a few items ahead of the reader.

    Threads, because the decoders of images run outside of Python's lock. Ends early, and promptly, on an error.
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
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def with_progress(results: Iterable[R], total: int, what: str) -> Iterator[R]:
    """``results`` unchanged, with a bar on a terminal and a line every tenth elsewhere. Both go to stderr."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(results, what, total, console=console, transient=True)
        return
    tenths: Sequence[int] = [total * tenth // 10 for tenth in range(1, 11)]
    for done, result in enumerate(results, start=1):
        yield result
        if done in tenths:
            print(f"{what}: {done}/{total}", file=sys.stderr)
