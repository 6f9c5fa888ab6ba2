"""Parameter groups for an optimiser."""

from __future__ import annotations

from typing import Any

from torch import nn

from malleable.layers import MalleableConv2d

_RECEPTIVE_FIELD = ("centers", "raw_temperature", "rebalance")


def parameter_groups(
    net: nn.Module, *, lr: float, weight_decay: float, receptive_field_lr: float = 1.0, head_lr: float = 1.0
) -> list[dict[str, Any]]:
    """Sort the trainable parameters of ``net`` into groups, each once; groups without parameters are left out.

    - ``"receptive_field"``: centers, temperature and rebalance of malleable layers, without weight decay, which would
      pull them towards 0 and so towards a particular receptive field.
    - ``"no_decay"``: biases and the parameters of normalisation layers, without weight decay.
    - ``"decay"``: all others.

    With ``head_lr`` other than 1 the parameters outside the backbone make two groups more, ``"head_no_decay"`` and
    ``"head_decay"``.

    Args:
        lr: learning rate.
        weight_decay: of the last group.
        receptive_field_lr: multiple of ``lr`` for the receptive field.
        head_lr: multiple of ``lr`` for what stands on a pretrained backbone and begins at random.

    Example:
        >>> import torch, malleable as mb
        >>> net = mb.MalleableConv2d(8, 8, 3)
        >>> groups = mb.parameter_groups(net, lr=0.01, weight_decay=1e-4)
        >>> optimizer = torch.optim.SGD(groups, momentum=0.9)
    """
    groups: dict[str, dict[str, Any]] = {
        "decay": {"lr": lr, "weight_decay": weight_decay},
        "no_decay": {"lr": lr, "weight_decay": 0.0},
        "receptive_field": {"lr": lr * receptive_field_lr, "weight_decay": 0.0},
        "head_decay": {"lr": lr * head_lr, "weight_decay": weight_decay},
        "head_no_decay": {"lr": lr * head_lr, "weight_decay": 0.0},
    }
    members: dict[str, list[nn.Parameter]] = {name: [] for name in groups}
    backbone = None if head_lr == 1 else {id(parameter) for parameter in _backbone(net).parameters()}
    seen: set[int] = set()
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                group = _group(module, name)
                in_head = backbone is not None and id(parameter) not in backbone and group != "receptive_field"
                members[f"head_{group}" if in_head else group].append(parameter)
    return [{"name": name, "params": members[name], **settings} for name, settings in groups.items() if members[name]]


def _group(module: nn.Module, name: str) -> str:
    if isinstance(module, MalleableConv2d) and name in _RECEPTIVE_FIELD:
        return "receptive_field"
    is_norm = "norm" in type(module).__name__.lower()  # torch's, timm's and one's own share no base class
    return "no_decay" if is_norm or name.endswith("bias") else "decay"


def _backbone(net: nn.Module) -> nn.Module:
    parts = (module for name, module in net.named_modules() if name.rpartition(".")[2] in ("backbone", "encoder"))
    backbone: nn.Module | None = next(parts, None)
    if backbone is not None:
        return backbone
    raise ValueError(f"head_lr: {type(net).__name__} has no part called backbone or encoder, so no head; use head_lr=1")
