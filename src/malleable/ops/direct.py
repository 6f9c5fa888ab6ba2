"""Tell when an operator may be called directly: PyTorch's dispatcher costs more than a small convolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_ORDINARY = {Tensor, nn.Parameter}

F = TypeVar("F", bound=Callable[..., Any])


def asked_once(function: F) -> F:
    """Have compilers ask ``function`` once, as they trace, and keep its answer.

    As ``torch.compiler.assume_constant_result``, which loads the compiler: 2 s that most programs never need.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_direct(*tensors: Tensor | None) -> bool:
    """Tell whether nobody watches the operators: no compiler, tracer, transform or mode, and ordinary CPU tensors."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or is_transformed():
        return False
    for t in tensors:  # noqa: SIM110  # all() takes half as long again
        if t is not None and (type(t) not in _ORDINARY or not t.is_cpu or t.is_neg()):  # its memory has other signs
            return False
    return True


@asked_once
def is_transformed() -> bool:
    """Tell whether torch.func or forward differentiation is at work, which know PyTorch's own operators only.

    Compilers ask once, as they trace, and guard both themselves.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


@asked_once
def is_exporting() -> bool:
    """Tell whether a graph is made for other runtimes.

    To code that is compiled PyTorch 2.7 says so in any case; here it is asked outside of that code, as compilers trace.
    """
    return torch.compiler.is_exporting()


def is_batched(grad: Tensor) -> bool:
    """Tell whether ``grad`` is many at once, as for ``torch.autograd.grad(is_grads_batched=True)``."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(grad))


def is_recorded(*tensors: Tensor | None) -> bool:
    """Tell whether autograd will want a gradient of what is computed from these."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def pointer(t: Tensor) -> int:
    """Return the address of the data of ``t``."""
    return t.data_ptr()
