"""Engines can run ``depth_conv2d``; this is the one place that chooses between them."""

from __future__ import annotations

import functools
import logging
import os
from typing import Protocol, cast

from torch import Tensor

from malleable.ops.engines import blocks, native, plain, triton
from malleable.ops.engines.plain import Gradients, Needs
from malleable.ops.engines.triton import LaunchError
from malleable.ops.window import Window

logger = logging.getLogger("malleable")


class Engine(Protocol):
    """A module with these names is an engine. See ``plain.py`` for what the functions mean."""

    name: str

    def can_run(self, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> str | None:
        """Return None if the engine can run the call, else the reason why not."""

    def forward(self, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> Tensor: ...

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int, needs: Needs
    ) -> Gradients: ...


ENGINES: dict[str, Engine] = {run.name: run for run in cast(list[Engine], [triton, native, blocks, plain])}
"""The engines by name, in the order in which they are preferred."""


def wish() -> str:
    """Return the engine that $MALLEABLE_ENGINE names, ``"auto"`` if it names none."""
    return os.environ.get("MALLEABLE_ENGINE") or "auto"


def check_engine(engine: str, source: str = "engine") -> None:
    """Refuse an engine that does not exist; ``source`` is who named it."""
    if engine != "auto" and engine not in ENGINES:
        raise ValueError(f"{source} must be 'auto' or one of {', '.join(map(repr, ENGINES))}, got {engine!r}")


def choose(engine: str, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> Engine:
    """Find the engine of that name; for ``"auto"`` the one of $MALLEABLE_ENGINE, or the first that can run the call.

    An engine that was asked for and cannot run the call is an error that says why.
    """
    check_engine(engine)
    source = f"engine={engine!r}"
    if engine == "auto":
        engine = wish()
        source = f"MALLEABLE_ENGINE={engine}"
        check_engine(engine, source)
    if engine != "auto":
        reason = ENGINES[engine].can_run(x, weight, assign, window, groups)
        if reason is not None:
            raise RuntimeError(f"{source} cannot run this call: {reason}")
        return ENGINES[engine]
    reasons = []
    for candidate in ENGINES.values():
        reason = candidate.can_run(x, weight, assign, window, groups)
        if reason is None:
            break
        reasons.append(f"not {candidate.name}: {reason}")
    why = "; ".join(reasons) or "the first choice"
    _log(candidate.name, tuple(x.shape), tuple(weight.shape), x.dtype, window, groups, why)
    return candidate


def instead(
    error: LaunchError, engine: str, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int
) -> Engine:
    """Find another engine for a call whose kernels could not be started, and warn; an engine asked for has no other."""
    if engine != "auto" or wish() != "auto":
        raise error
    triton.give_up(error, x, weight, assign, groups)
    other = choose(engine, x, weight, assign, window, groups)
    sizes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, {x.dtype}, groups {groups}"
    logger.warning("engine %s takes over calls such as %s from triton, slower: %s", other.name, sizes, error)
    return other


@functools.lru_cache(maxsize=1024)
def _log(*choice: object) -> None:
    """Log a choice of engine; the cache sees to it that each shape is logged once."""
    logger.debug("engine %s for x %s, weight %s, %s, %s, groups %d (%s)", *choice)
