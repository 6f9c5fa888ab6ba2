"""Eval mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(net: nn.Module) -> Iterator[None]:
    """Put ``net`` in eval mode, and afterwards each of its modules back in its own: norms may have been frozen."""
    modes = [(module, module.training) for module in net.modules()]
    training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(training)  # a network's own may do more than set the mode
        for module, mode in modes:
            module.training = mode
