"""The engines that can run ``depth_conv2d``, and the one place that chooses between them."""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor

from malleable.ops import plain, triton_engine
from malleable.window import Window


class Engine(Protocol):
    """A module with these names is an engine. See ``plain.py`` for what the functions mean."""

    name: str

    def can_run(self, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> str | None:
        """None if it can, else the reason why not."""

    def forward(self, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> Tensor: ...

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        assign: Tensor,
        window: Window,
        groups: int,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]: ...


ENGINES: dict[str, Engine] = {engine.name: engine for engine in [cast(Engine, triton_engine), cast(Engine, plain)]}
"""By name, the preferred first."""


def check_engine(engine: str) -> None:
    if engine != "auto" and engine not in ENGINES:
        raise ValueError(f"engine must be 'auto' or one of {', '.join(map(repr, ENGINES))}, got {engine!r}")


def choose(engine: str, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> Engine:
    """The engine of that name, or for ``"auto"`` the first that can run the call."""
    check_engine(engine)
    reasons = {}
    for candidate in ENGINES.values() if engine == "auto" else [ENGINES[engine]]:
        reason = candidate.can_run(x, weight, assign, window, groups)
        if reason is None:
            return candidate
        reasons[candidate.name] = reason
    raise RuntimeError(f"engine={engine!r} cannot run this call: {reasons}")
