"""How depth reaches a layer deep inside foreign code.

Foreign code calls a layer as ``conv(x)``, so the geometry must come from beside the arguments. Rewriting the graph (FX)
fails on code it cannot trace; tags on tensors are dropped by the first operator; a global is shared by networks that
have nothing to do with each other. So every converted network owns one slot: its forward puts the geometry of the pass
there, and a forward pre-hook of each placed layer hands it on. Compilers trace through the slot and keep the plain data
flow. It holds one value per thread, and copies and pickles as an empty slot that the layers of the copy share.
Activation checkpointing runs layers again during backward: gradient hooks on the outputs then name the geometry of that
very pass. Autograd runs the nodes of a later pass before those of an earlier one, so even one backward over two passes
finds the right geometry for each. A layer that finds none says so; it never takes another pass's.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from malleable.geometry import Geometry


class Slot(threading.local):
    """Holds the geometry of the running pass for the placed layers of one network."""

    def __init__(self) -> None:  # runs once in every thread that looks here
        self.geometry: Geometry | None = None  # of the forward pass that is running
        self.replayed: weakref.ref[Geometry] | None = None  # of the backward that is running; its graph owns it

    def __reduce__(self) -> tuple[type[Slot], tuple[()]]:
        return Slot, ()

    def supply(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Add the geometry to the arguments of a placed layer, as its forward pre-hook, unless the caller gave one."""
        given = (*args, *kwargs.values())  # nn.Conv2d calls its argument input, the layers theirs x
        return None if len(given) > 1 else ((*given, self.current()), {})

    def replay(self, outputs: Any, geometry: Geometry) -> None:
        """Have the backward of ``outputs`` find ``geometry``, should it run layers again."""

        def name_geometry(grad: Tensor) -> None:
            self.replayed = weakref.ref(geometry)

        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(name_geometry)  # type: ignore[no-untyped-call]

    def current(self) -> Geometry:
        """Return the geometry of the pass that is running; raises outside of one."""
        geometry = self.geometry
        if geometry is None and self.replayed is not None and _in_backward():
            geometry = self.replayed()
        if geometry is None:
            raise RuntimeError(
                "a converted layer was run outside a call of its network and has no depth; "
                "call net(image, depth=depth, focal=focal), not net.model or a part of it"
            )
        return geometry


def _in_backward() -> bool:
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1  # as torch.utils.checkpoint asks
