"""Parameter groups for an optimiser."""

from __future__ import annotations

from typing import Any

from torch import nn

from malleable.layers import MalleableConv2d

_RECEPTIVE_FIELD = ("centers", "raw_temperature", "rebalance")


def parameter_groups(
    net: nn.Module, *, lr: float, weight_decay: float, receptive_field_lr: float = 1.0
) -> list[dict[str, Any]]:
    """Sort the trainable parameters of ``net`` into groups, each once; groups without parameters are left out.

    - ``"receptive_field"``: centers, temperature and rebalance of malleable layers, without weight decay, which would
      pull them towards 0 and so towards a particular receptive field.
    - ``"no_decay"``: biases and the parameters of normalisation layers, without weight decay.
    - ``"decay"``: all others.

    Args:
        lr: learning rate.
        weight_decay: of the last group.
        receptive_field_lr: multiple of ``lr`` for the receptive field.

    Example:
        >>> optimizer = torch.optim.SGD(parameter_groups(net, lr=0.01, weight_decay=1e-4), momentum=0.9)
    """
    groups: dict[str, dict[str, Any]] = {
        "decay": {"lr": lr, "weight_decay": weight_decay},
        "no_decay": {"lr": lr, "weight_decay": 0.0},
        "receptive_field": {"lr": lr * receptive_field_lr, "weight_decay": 0.0},
    }
    members: dict[str, list[nn.Parameter]] = {name: [] for name in groups}
    seen: set[int] = set()
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                members[_group(module, name)].append(parameter)
    return [{"name": name, "params": members[name], **settings} for name, settings in groups.items() if members[name]]


def _group(module: nn.Module, name: str) -> str:
    if isinstance(module, MalleableConv2d) and name in _RECEPTIVE_FIELD:
        return "receptive_field"
    is_norm = "norm" in type(module).__name__.lower()  # torch's, timm's and one's own share no base class
    return "no_decay" if is_norm or name.endswith("bias") else "decay"
