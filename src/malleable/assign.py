"""The assigning functions g_k say which share of a neighbour each kernel takes (paper, Eqs. 5-7, 10 and 11).

Eq. 1 gives a *nearer* neighbour a positive relative difference d, so kernels with positive centers look in front of the
center pixel and those with negative centers behind it. (The paper's appendix numbers its kernels the other way round.)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Invalid = Literal["same", "uniform", "ignore"]

# Beyond a million grid cells every g_k is 0 to the last bit; without the bound d² would overflow and inf − inf is NaN.
FARTHEST = 1e6


def malleable_logits(d: Tensor, centers: Tensor, temperature: Tensor | float) -> Tensor:
    """Compute h_0 … h_{K+1} (Eqs. 6 and 7), (N, K + 2, ...).

    d are relative depth differences (N, ...), centers a_0 … a_{K+1}, (K + 2,), and the temperature t is positive.
    """
    d = d.to(torch.promote_types(d.dtype, torch.float32))
    a = centers.view(1, -1, *[1] * (d.ndim - 1))
    offset = d.clamp(-FARTHEST, FARTHEST).unsqueeze(1) - a  # d − a_k
    first, inner, last = offset[:, :1], offset[:, 1:-1], offset[:, -1:]
    h_first = -first * first.abs()  # −sgn(d − a_0) (d − a_0)²
    h_inner = -inner * inner
    h_last = last * last.abs()  # sgn(d − a_{K+1}) (d − a_{K+1})²
    return torch.cat([h_first, h_inner, h_last], dim=1) / temperature


def malleable_assign(d: Tensor, centers: Tensor, temperature: Tensor | float) -> Tensor:
    """Compute malleable g_1 … g_K, (N, K, ...): a softmax of :func:`malleable_logits`, less the outer two (Eq. 5)."""
    return malleable_logits(d, centers, temperature).softmax(dim=1)[:, 1:-1]


def hard_assign(d: Tensor, kernels: int) -> Tensor:
    """Compute the 2.5D g_1 … g_K, 1 where k − 1 − K/2 ≤ d < k − K/2, else 0 (Eq. 11): (N, ...) → (N, K, ...)."""
    k = torch.arange(1, kernels + 1, dtype=d.dtype, device=d.device).view(1, -1, *[1] * (d.ndim - 1))
    d = d.unsqueeze(1)
    return ((k - 1 - kernels / 2 <= d) & (d < k - kernels / 2)).to(d.dtype)


def depth_aware_assign(difference: Tensor, alpha: float) -> Tensor:
    """Compute the depth-aware g_1 = exp(−α |depth(i) − depth(j)|) of metres (Eq. 10): (N, ...) → (N, 1, ...)."""
    return torch.exp(-alpha * difference.abs()).unsqueeze(1)


def handle_invalid(assign: Tensor, valid: Tensor, invalid: Invalid, scale: Tensor | None = None) -> Tensor:
    """Replace what a tap without depth is worth.

    assign is scale_k · g_k, (N, K, ...), with a difference of 0 at such taps: already the answer for ``"same"``.
    ``"uniform"`` stands for g_k = 1 / (K + 2), ``"ignore"`` for 0. valid is (N, ...) bool, scale (K,) or 1.
    """
    if invalid == "same":
        return assign
    kernels = assign.shape[1]
    worth = assign.new_full((kernels,), 1 / (kernels + 2) if invalid == "uniform" else 0.0)
    worth = worth if scale is None else worth * scale
    return torch.where(valid.unsqueeze(1), assign, worth.view(1, -1, *[1] * (assign.ndim - 2)))
