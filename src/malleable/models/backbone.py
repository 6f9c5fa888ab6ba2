"""Backbones from timm: features at four rates, their stages, their pretrained weights."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from malleable.models.convert import Converted, Placed, add_depth_input, check_options, place
from malleable.models.depth_input import DepthEncoder, Kind
from malleable.models.stages import Watched
from malleable.models.watch import watch

STAGES = (2, 3, 4, 5)
"""The paper's res2 … res5; their features come at 1/4, 1/8, 1/16 and 1/32 of the image, dilated ones excepted."""


def build(
    name: str,
    output_stride: int,
    conv: str | None,
    kernels: int,
    stages: Sequence[int],
    depth_input: Kind | None,
    widths: Sequence[int] | None,
    options: dict[str, Any],
    multi_grid: Sequence[int] = (),
) -> tuple[Converted, list[int]]:
    """Build a timm network whose convolutions see depth; return it and the channels of res2 … res5, its last four maps.

    Args:
        name: of a timm model.
        output_stride: 8, 16 or 32.
        conv, kernels, depth_input, options: as for :func:`malleable.convert`.
        widths: channels of res2 … res5, for backbones whose timm factory takes ``channels``.
        stages: in which of res2 … res5 the first k × k convolution of the first residual unit is replaced.
        multi_grid: dilations of res5's units, of a ResNet.
    """
    if not set(stages) <= set(STAGES) or len(set(stages)) < len(stages):
        raise ValueError(f"stages must be among {STAGES}, each once, got {tuple(stages)}")
    if widths is not None and (len(widths) != len(STAGES) or min(widths) < 1):
        raise ValueError(f"channels must be four positive numbers, of res2 … res5, got {tuple(widths)}")
    check_options(conv, options)
    features = _create(name, output_stride, widths)
    if multi_grid:
        _dilate(features, multi_grid, name)
    channels: list[int] = features.feature_info.channels()[-4:]
    if (conv is None or not stages) and depth_input is None:
        return Converted(features), channels
    seen = watch(features)
    channel = add_depth_input(depth_input, features, seen)
    if conv is None or not stages:
        return Converted(features, (), channel), channels
    found = first_of_stages(features, seen, name)
    missing = [f"res{stage}" for stage in stages if stage not in found]
    if missing:
        hint = "" if widths is None else "; stages of one resolution are told apart by channels, so these must differ"
        raise ValueError(
            f"stages={tuple(stages)}: {name} has no k × k, k > 1, convolution to replace in {', '.join(missing)}{hint}"
        )
    placed = [Placed(found[stage], f"res{stage}", seen.rate(found[stage])) for stage in stages]
    return place(features, placed, conv, kernels, options, channel, seen), channels


def build_depth_encoder(
    kind: Kind, name: str, output_stride: int, widths: Sequence[int] | None, fill_depth: bool, smooth_depth: int
) -> DepthEncoder:
    """Build the same timm network for a channel of depth, see :func:`build`."""
    return DepthEncoder(kind, _create(name, output_stride, widths, in_chans=1), fill_depth, smooth_depth)


def load(network: Converted, name: str, pretrained: bool | str | Path, widths: Sequence[int] | None = None) -> None:
    """Load ImageNet weights into a network that :func:`build` made, see :func:`malleable.deeplabv3plus`."""
    if pretrained is True and widths is not None:
        raise ValueError(f"pretrained: no ImageNet weights fit channels={tuple(widths)}; say pretrained=False")
    if pretrained is True:
        network.load_original(_download(name))
    elif pretrained is not False:
        source = f"{pretrained} does not fit backbone {name!r}"
        network.load_original(_pick(read_weights(pretrained), network.original_state(), source))


def require_backbone(name: str) -> None:
    """Raise if timm has no model of this name, with the nearest that it has."""
    import timm

    if not isinstance(name, str) or not timm.is_model(name):
        near = get_close_matches(str(name).lower(), timm.list_models(), n=1)
        question = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backbone must be a timm model, see timm.list_models(), got {name!r}{question}")


def _create(name: str, output_stride: int, widths: Sequence[int] | None = None, **options: Any) -> Any:
    """Make timm's ``name`` return a list of feature maps, the last at ``output_stride``."""
    import timm  # takes a second to import

    if output_stride not in (8, 16, 32):
        raise ValueError(f"output_stride must be 8, 16 or 32, got {output_stride}")
    require_backbone(name)
    if output_stride != 32:
        options["output_stride"] = output_stride
    if widths is not None:
        options["channels"] = tuple(widths)
    try:
        network: Any = timm.create_model(name, features_only=True, **options)
    except (TypeError, AssertionError, NotImplementedError) as error:
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        raise ValueError(
            f"backbone {name!r} does not take {given}; leave it out or use another backbone"
            f"{f' ({error})' if str(error) else ''}"
        ) from error
    if getattr(network, "output_fmt", None) == "NHWC":
        raise ValueError(f"backbone {name!r} gives maps with channels last, which no decoder reads; use another one")
    expected = [min(rate, output_stride) for rate in (4, 8, 16, 32)]
    if network.feature_info.reduction()[-4:] != expected:
        raise ValueError(
            f"backbone {name!r} gives features at 1/{network.feature_info.reduction()}, not at 1/{expected} as "
            f"output_stride={output_stride} needs; use another output_stride or backbone"
        )
    return network


def _dilate(features: Any, dilations: Sequence[int], name: str) -> None:
    """Set the dilation of the k × k convolutions in each unit of res5, as far as there are units."""
    if not hasattr(features, "layer4"):
        raise ValueError(f"merge='released' needs a ResNet, whose res5 is dilated unit by unit, got backbone {name!r}")
    for unit, dilation in zip(features.layer4, dilations, strict=False):
        for module in unit.modules():
            if isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1:
                module.dilation = (dilation, dilation)
                module.padding = tuple(dilation * (size // 2) for size in module.kernel_size)


def first_of_stages(features: Any, seen: Watched, name: str) -> dict[int, str]:
    """Find the first k × k convolution of the first residual unit of each stage (2 … 5).

    A stage is what lies between two feature maps; blocks that timm counts apart but that share a rate are one stage.
    """
    order = [_plain(module) for module, _ in features.named_modules()]
    ends = []  # where in that order each feature map is complete
    for module in map(_plain, features.feature_info.module_name()):
        inside = [i for i, other in enumerate(order) if f"{other}.".startswith(f"{module}.")]
        if not inside:
            raise ValueError(
                f"cannot tell the stages of backbone {name!r} apart; use malleable.models.convert and name layers"
            )
        ends.append(inside[-1])
    stages: dict[int, str] = {}
    for convolution in seen.first_of_stages():
        level = bisect_left(ends, order.index(_plain(convolution)))
        stages.setdefault(level - len(ends) + STAGES[-1] + 1, convolution)
    return stages


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors or torch file. Nothing in the file is executed."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"pretrained: there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except Exception as error:  # of a foreign file the unpickler makes errors of any kind
        raise ValueError(
            f"pretrained: {path} is broken, or holds more than tensors, which could run code; save a state_dict() alone"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"pretrained: {path} must hold a state dict, tensors by name, got a {type(content).__name__}")
    return {key.removeprefix("module."): value for key, value in content.items() if isinstance(value, Tensor)}


def _pick(weights: dict[str, Tensor], wanted: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Pick from a whole network's ``weights`` those ``wanted``; timm may write an underscore for their dot."""
    given = {_plain(key): value for key, value in weights.items()}
    picked, wrong = {}, []
    for key, own in wanted.items():
        value = given.get(_plain(key), own if key.endswith("num_batches_tracked") else None)
        if value is None:
            wrong.append(f"{key} is missing")
        elif value.shape != own.shape:
            wrong.append(f"{key} has shape {tuple(value.shape)}, not {tuple(own.shape)}")
        else:
            picked[key] = value
    if wrong:
        more = f", and {len(wrong) - 1} more tensors differ" if len(wrong) > 1 else ""
        raise ValueError(f"pretrained: {source}: {wrong[0]}{more}")
    return picked


def _download(name: str) -> dict[str, Tensor]:
    import timm
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    advice = "pass pretrained=<a safetensors or torch file> or pretrained=False"
    source = timm.get_pretrained_cfg(name)
    if source is None or not source.has_weights:
        raise RuntimeError(f"pretrained=True: timm has no weights for {name!r}; {advice}")
    files = ("model.safetensors", "pytorch_model.bin")
    hub = source.hf_hub_id
    try:
        if hub and not any(isinstance(try_to_load_from_cache(hub, file), str) for file in files):
            get_session().head(constants.ENDPOINT, timeout=10)  # the download itself would retry for a minute
        return cast(dict[str, Tensor], _create(name, 32, pretrained=True).state_dict())
    except Exception as error:  # each library on the way has its own
        raise RuntimeError(
            f"pretrained=True: the weights of {name!r} could not be downloaded ({type(error).__name__}); {advice}"
        ) from error


def _plain(name: str) -> str:
    return name.replace("_", ".")
