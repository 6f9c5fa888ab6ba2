"""Networks of other libraries, and of one's own, that see depth and give logits at the size of the image."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from malleable.models.backbone import read_weights, require_backbone
from malleable.models.convert import Converted, convert
from malleable.models.deeplab import DeepLabV3Plus
from malleable.models.depth_input import Kind
from malleable.models.merge import resize
from malleable.models.modes import eval_mode

DEEPLAB = "deeplabv3plus"
"""The network of this library; all others are foreign."""

_CLASSES = ("classes", "num_classes", "num_labels")
_WEIGHTS = (
    "encoder_weights", "weights", "weights_backbone", "pretrained", "pretrained_backbone", "use_pretrained_backbone",
    "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path",
)  # fmt: skip
_CODE = ("attn_implementation", "trust_remote_code", "auto_map")
_ENCODERS = ("encoder_name", "backbone")


class Unavailable(ValueError):
    """Says why a network cannot be built here: its code is not trusted, or not installed."""


class Foreign(nn.Module):
    """Gives the logits of a converted network as (N, num_classes, H, W), at the size of the image.

    :func:`foreign` makes it. ``settings`` are the arguments to make it again with, the places of its layers by name.

    Args:
        converted: the network; it may return a tensor, an object with ``logits``, or a dict with ``"out"``.
        multiple: height and width that it takes are multiples of this; others are padded and the logits cropped.
    """

    def __init__(self, converted: Converted, multiple: int, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.converted, self.multiple, self.settings = converted, multiple, dict(settings)

    @property
    def places(self) -> tuple[str, ...]:
        """Name the placed layers, as in the network before conversion."""
        return tuple(placed.name for placed in self.converted.placed)

    @torch.no_grad()
    def require_logits(self, height: int, width: int) -> None:
        """Raise if it answers a blank image of this size with anything else; detectors do so in eval mode only."""
        blank = torch.zeros(1, 3, height, width)
        with eval_mode(self):
            self(blank, depth=blank[:, :1], focal=1.0)

    def forward(self, rgb: Tensor, depth: Tensor | None = None, focal: float | Tensor | None = None) -> Tensor:
        """Return logits (N, num_classes, H, W) for ``rgb`` (N, 3, H, W); ``depth``, ``focal`` as ``convert`` says."""
        height, width = rgb.shape[-2:]
        geometry = self.converted.geometry(rgb, depth, focal)
        if self.multiple > 1:
            border = (0, -width % self.multiple, 0, -height % self.multiple)
            rgb, geometry = pad(rgb, border), None if geometry is None else geometry.padded(border)
        logits = self._logits(self.converted.run(geometry, rgb))
        return resize(logits, rgb)[..., :height, :width]

    def _logits(self, output: Any) -> Tensor:
        if isinstance(output, Mapping):
            output = output.get("out", output.get("logits", output))
        output = getattr(output, "logits", output)
        name, classes = self.settings["network"], self.settings["num_classes"]
        expected = f"not logits (N, {classes}, height, width), one map a class, nor a dict with them as 'out'"
        if not isinstance(output, Tensor):
            parts = f" of {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
            raise ValueError(f"model.network={name} returns a {type(output).__name__}{parts}, {expected}")
        if output.ndim != 4 or output.shape[1] != classes:
            hint = '; model.options: {global_pool: ""} keeps the map' if name.startswith("timm:") else ""
            raise ValueError(f"model.network={name} returns {tuple(output.shape)}, {expected}{hint}")
        return output


Network = DeepLabV3Plus | Foreign


def foreign(
    network: str,
    num_classes: int,
    conv: str | None = "malleable",
    kernels: int = 3,
    where: str | Sequence[str] = "first-of-stage",
    depth_input: Kind | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    pretrained: bool | str = False,
    trust: bool = False,
    **layer_options: Any,
) -> Foreign:
    """Build a network that this library does not know, and convert it.

    Args:
        network: ``"smp:Unet"``, ``"torchvision:deeplabv3_resnet50"``, ``"timm:dla34"``,
            ``"transformers:SegformerForSemanticSegmentation"``, or ``"package.module:factory"``, which is called as
            ``factory(num_classes=..., **options)``.
        num_classes: of the logits.
        conv, kernels, where, depth_input: as for :func:`malleable.convert`.
        options: what the network's own constructor takes; for transformers what its configuration takes.
        pretrained: True takes the library's ImageNet weights, a path a state dict of the network before conversion; for
            transformers the name of a repository or a folder.
        trust: a factory of one's own is imported only with this.
        layer_options: for the layers, for example ``temperature=2.0``.
    """
    options = dict(options or {})
    library, name = _split(network)
    if library in _LIBRARIES:
        _check_options(options)
        model = _from_library(network, num_classes, pretrained, options)
    elif not trust:
        raise Unavailable(
            f"the network is {network!r}, and building it runs code of that name; if you know and trust that code, "
            "say --trust (trust=True in Python)"
        )
    else:
        factory, given = _factory(library, name), {"num_classes": num_classes, **options}
        _check_arguments(factory, given, network)
        model = factory(**given)
        if not isinstance(model, nn.Module):
            raise ValueError(f"model.network={network} must return a torch.nn.Module, got a {type(model).__name__}")
    if isinstance(pretrained, str) and library != "transformers":
        _load(model, pretrained, network)
    chosen = where if isinstance(where, str) else list(where)
    try:
        converted = convert(model, conv, kernels, chosen, depth_input, **layer_options)
    except TypeError as error:
        raise ValueError(f"model.network={network}: {error}") from error
    settings = {
        "network": network,
        "num_classes": num_classes,
        "conv": conv,
        "kernels": kernels,
        "where": [placed.name for placed in converted.placed] or chosen,
        "depth_input": depth_input,
        "options": options,
        **layer_options,
    }
    return Foreign(converted, 32 if library == "timm" else _multiple(model), settings)  # DLA takes no other sizes


def from_settings(settings: Mapping[str, Any], trust: bool = False) -> Network:
    """Build the network again whose ``settings`` these are; weights are not looked for."""
    if settings.get("network", DEEPLAB) != DEEPLAB:
        return foreign(**settings, pretrained=False, trust=trust)
    return DeepLabV3Plus(**{name: value for name, value in settings.items() if name != "network"})


def is_own(network: str) -> bool:
    """Tell whether ``network`` is a factory of one's own, whose code nobody else has."""
    library, named, _ = network.partition(":")
    return bool(named) and library not in _LIBRARIES


def require_network(network: str, options: Mapping[str, Any]) -> None:
    """Raise if there is no such network, as far as can be told without running code of one's own."""
    library, name = _split(network)
    if library in _LIBRARIES:
        _check_options(options)
        _LIBRARIES[library][1](name)


def _split(network: str) -> tuple[str, str]:
    if not re.fullmatch(r"[\w.]+:[\w.\-/]+", network):
        kinds = ", ".join(f"{library}:NAME" for library in _LIBRARIES)
        raise ValueError(f"model.network must be {DEEPLAB}, {kinds} or package.module:factory, got {network!r}")
    library, _, name = network.partition(":")
    return library, name


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise if options, which may come from a file of somebody else, go beyond the shape of the network."""
    for key, value in _entries(options):
        if key in _ENCODERS and re.search("[/:]", str(value)):
            raise ValueError(
                f"model.options has {key}={value!r}, which would be fetched from elsewhere; name an encoder that the "
                "library has"
            )
        for names, reason in (
            (_CLASSES, "the data says how many classes there are"),
            (_WEIGHTS, "model.pretrained names the weights"),
            ((*_CODE, key if key.startswith("_") else ""), "it could have code fetched and run"),
        ):
            if key in names:
                raise ValueError(f"model.options must not have {key!r}: {reason}")


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Go through all keys and their values, however deep."""
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in parts:
        yield str(key), part
        yield from _entries(part)


def _from_library(network: str, num_classes: int, pretrained: bool | str, options: dict[str, Any]) -> nn.Module:
    library, name = _split(network)
    build = _LIBRARIES[library][1](name)
    try:
        return build(num_classes, pretrained, options)
    except Exception as error:  # foreign code may fail in any way
        reason = " ".join(str(error).split())
        weights = " and model.pretrained the weights to start from" if pretrained is not False else ""
        raise ValueError(
            f"model.network={network} cannot be built ({type(error).__name__}: {reason}); model.options are its "
            f"arguments{weights}"
        ) from error


_Build = Callable[[int, bool | str, dict[str, Any]], nn.Module]


def _smp(name: str) -> _Build:
    known = _imported("smp").MODEL_ARCHITECTURES_MAPPING
    if name.lower() not in known:
        names = ", ".join(architecture.__name__ for architecture in known.values())
        raise ValueError(f"model.network: segmentation_models_pytorch has {names}, got {name!r}")
    kind = known[name.lower()]

    def build(classes: int, pretrained: bool | str, options: dict[str, Any]) -> nn.Module:
        unknown = [option for option in options if option not in signature(kind).parameters]
        if unknown and not str(options.get("encoder_name")).startswith("tu-"):  # to which they are handed on
            raise ValueError(f"it has no argument {unknown[0]!r}")
        weights = "imagenet" if pretrained is True else None
        return kind(**options, encoder_weights=weights, classes=classes)  # type: ignore[no-any-return]

    return build


def _torchvision(name: str) -> _Build:
    models = _imported("torchvision").models
    known = models.list_models(module=models.segmentation)
    if name not in known:
        raise ValueError(f"model.network: torchvision segments with {', '.join(known)}, got {name!r}")
    return lambda classes, pretrained, options: models.get_model(
        name, **options, weights=None, weights_backbone="DEFAULT" if pretrained is True else None, num_classes=classes
    )


def _timm(name: str) -> _Build:
    require_backbone(name)
    return lambda classes, pretrained, options: _imported("timm").create_model(
        name, **options, pretrained=pretrained is True, num_classes=classes
    )


def _transformers(name: str) -> _Build:
    kind = getattr(_imported("transformers"), name, None) if name.endswith("ForSemanticSegmentation") else None
    if kind is None:
        raise ValueError(f"model.network: transformers has no {name!r} whose name ends in ForSemanticSegmentation")

    def build(classes: int, pretrained: bool | str, options: dict[str, Any]) -> nn.Module:
        config = kind.config_class(**options, num_labels=classes)
        if pretrained is True:
            raise ValueError("transformers chooses no weights by itself: name a repository or folder, or false")
        if pretrained is False:
            return kind(config)  # type: ignore[no-any-return]
        return kind.from_pretrained(  # type: ignore[no-any-return]
            pretrained, config=config, ignore_mismatched_sizes=True, use_safetensors=True
        )

    return build


_LIBRARIES: dict[str, tuple[str, Callable[[str], _Build]]] = {
    "smp": ("segmentation_models_pytorch", _smp),
    "torchvision": ("torchvision", _torchvision),
    "timm": ("timm", _timm),
    "transformers": ("transformers", _transformers),
}
"""Prefix → the package, and what finds the builder of a name in it."""


def _imported(library: str) -> Any:
    package = _LIBRARIES[library][0]
    try:
        return import_module(package)
    except ImportError as error:
        raise Unavailable(f"{library}: networks need {package}: pip install {package.replace('_', '-')}") from error


def _check_arguments(factory: Callable[..., Any], given: Mapping[str, Any], network: str) -> None:
    """Raise if a factory does not take what it would be ``given``; what goes wrong inside it is its own matter."""
    try:
        signature(factory).bind(**given)
    except TypeError as error:
        raise ValueError(f"model.network={network}: {error}; model.options go to it by name") from error


def _factory(module: str, name: str) -> Any:
    """Import a factory of one's own; its module may lie in the current folder."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # its own imports
            raise
        raise Unavailable(f"model.network={module}:{name}: there is no module {module!r} here") from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ValueError(f"model.network={module}:{name}: {module} has no function or class {name!r}")
    return found


def _load(model: nn.Module, path: str | Path, network: str) -> None:
    try:
        model.load_state_dict(read_weights(path))
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"pretrained: {path} does not fit {network} before conversion: {reason}") from error


def _multiple(model: nn.Module) -> int:
    """Find what height and width must be multiples of, as segmentation_models_pytorch says it."""
    return int(model.encoder.output_stride) if getattr(model, "requires_divisible_input_shape", False) else 1  # type: ignore[union-attr, arg-type]
