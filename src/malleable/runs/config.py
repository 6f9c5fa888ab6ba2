"""What a run is made of: typed settings that the command line, YAML files and checkpoints share."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np

from malleable.geometry import check_smooth_depth
from malleable.models import deeplabv3plus
from malleable.models.convert import check_kernels
from malleable.models.foreign import DEEPLAB, Network, foreign
from malleable.runs.settings import checked


@dataclass(frozen=True)
class ModelConfig:
    """The network: DeepLabv3+ with the arguments of ``malleable.deeplabv3plus``, or any other that is named.

    Args:
        backbone: a timm model.
        conv: what replaces the convolutions that see depth; null is the RGB baseline.
        kernels: K; depth_aware has 1, said or not.
        stages: which of res2 … res5.
        output_stride: 8, 16 or 32.
        merge: the multi-stage merging block of the NYUDv2 network, or released, the network of the authors' code.
        depth_input: depth as one more channel of the first convolution, metric or relative; null shows it to the
            layers alone.
        depth_encoder: a second backbone for depth, metric or relative, whose maps are added; null has none.
        fill_depth: unknown depth is interpolated from what is known around it.
        smooth_depth: passes of a median over 3 × 3 pixels of depth, against noise; 0 takes depth as it is.
        width: channels of ASPP and decoder.
        skip: channels of the skip from res2.
        channels: of res2 … res5, for a narrower backbone; null takes the backbone's own.
        pretrained: ImageNet weights: true downloads the library's, a path reads a file, false starts at random.
        centers: a_0 … a_{K+1} to start from; null takes −(K+1)/2 … (K+1)/2. Malleable only.
        temperature: t to start from. Malleable only.
        learnable: which of centers, temperature, rebalance are trained. Malleable only.
        invalid: what a pixel without depth counts as.
        network: deeplabv3plus, smp:Unet, torchvision:deeplabv3_resnet50, timm:NAME, transformers:CLASS, or
            package.module:factory. All but the first take options and where instead of backbone, stages, output_stride,
            merge, depth_encoder, width, skip and channels.
        options: arguments of the network by name, for example encoder_name of smp:Unet.
        where: which convolutions see depth: first-of-stage, all, or names and globs of modules.
    """

    backbone: str = "resnet50s"
    conv: Literal["malleable", "conv25d", "depth_aware"] | None = "malleable"
    kernels: int = 3
    stages: tuple[int, ...] = (2, 3, 4, 5)
    output_stride: Literal[8, 16, 32] = 16
    merge: bool | Literal["released"] = False
    depth_input: Literal["metric", "relative"] | None = None
    depth_encoder: Literal["metric", "relative"] | None = None
    fill_depth: bool = False
    smooth_depth: int = 0
    width: int = 256
    skip: int = 48
    channels: tuple[int, ...] | None = None
    pretrained: bool | str = True
    centers: tuple[float, ...] | None = None
    temperature: float = 1.0
    learnable: tuple[Literal["centers", "temperature", "rebalance"], ...] = ("centers", "temperature", "rebalance")
    invalid: Literal["same", "uniform", "ignore"] = "same"
    network: str = DEEPLAB
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    where: str | tuple[str, ...] = "first-of-stage"

    @property
    def architecture(self) -> str:
        """Name the network as tables do: DeepLabv3+ by its backbone, others by their own name."""
        encoder = self.options.get("encoder_name")
        return self.backbone if self.network == DEEPLAB else f"{self.network}{f' on {encoder}' if encoder else ''}"

    @property
    def sees_depth(self) -> bool:
        """Whether depth has any effect on the network."""
        return (self.conv, self.depth_input, self.depth_encoder) != (None, None, None)

    def layer_options(self) -> dict[str, Any]:
        """What the layers take besides their shape."""
        options: dict[str, Any] = {} if self.conv is None else {"invalid": self.invalid}
        if self.conv == "malleable":
            options.update(centers=self.centers, temperature=self.temperature, learnable=self.learnable)
        return options

    def __post_init__(self) -> None:
        defaults = {item.name: item.default for item in fields(self)} | {"options": {}}
        own = {"backbone", "stages", "output_stride", "merge", "depth_encoder", "width", "skip", "channels"}
        for name in {"options", "where"} if self.network == DEEPLAB else own:
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"model.{name} is set to {getattr(self, name)}, but network={self.network} does not take it"
                    + ("" if self.network == DEEPLAB else "; its own arguments stand under model.options")
                )
        for name in {"centers", "temperature", "learnable", "invalid"} - self.layer_options().keys():
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"model.{name} is set to {getattr(self, name)}, but conv={self.conv} does not take it")
        check_kernels(self.conv, self.kernels)
        check_smooth_depth(self.smooth_depth)
        _require_finite("model", self)


@dataclass(frozen=True)
class DataConfig:
    """The data and its augmentation.

    Args:
        root: a folder with dataset.json, Cityscapes' tree, or "rooms" or "streets" for synthetic scenes, of 120 × 160
            pixels or as small as "rooms:72x96" says.
        train: the split to learn from.
        val: the split to validate on.
        crop: height and width.
        scales: factors of the random scaling.
        flip: probability of the horizontal flip.
        depth_dropout: probability that all depth of an image is unknown.
        depth_holes: probability of holes in depth, over up to nine tenths of the image.
        depth_noise: largest relative standard deviation of noise in depth; each image draws its own.
        workers: loading processes for each device; 0 loads in the training process.
    """

    root: str = "rooms"
    train: str = "train"
    val: str = "val"
    crop: tuple[int, int] = (480, 480)
    scales: tuple[float, ...] = (0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
    flip: float = 0.5
    depth_dropout: float = 0.0
    depth_holes: float = 0.0
    depth_noise: float = 0.0
    workers: int = 2

    def __post_init__(self) -> None:
        if min(self.crop) < 1:
            raise ValueError(f"data.crop must be a height and a width of at least 1, got {list(self.crop)}")
        if self.workers < 0:
            raise ValueError(f"data.workers must not be negative, got {self.workers}")
        for name in ("flip", "depth_dropout", "depth_holes"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.{name} must be a probability from 0 to 1, got {getattr(self, name)}")
        if not 0 <= self.depth_noise < 1:
            raise ValueError(f"data.depth_noise must be at least 0 and below 1, got {self.depth_noise}")
        _require_finite("data", self)


@dataclass(frozen=True)
class TrainConfig:
    """The recipe. The defaults are the paper's for NYUDv2.

    Args:
        steps: updates of the weights.
        batch_size: images in one update, over all devices and accumulated parts together.
        optimizer: sgd or adamw.
        lr: the largest learning rate, that of step 0 without warm-up.
        momentum: of SGD.
        weight_decay: of weights; biases, norms and receptive fields have none.
        schedule: how the learning rate falls to 0: poly, or half a cosine.
        power: of the poly schedule, lr · (1 − step / steps) ** power.
        warmup: steps over which the learning rate rises to the schedule's.
        receptive_field_lr: multiple of lr for centers, temperature and rebalance.
        head_lr: multiple of lr for all that is not the backbone.
        loss: cross_entropy over all pixels, or bootstrapped over the hard ones.
        bootstrap_threshold: a pixel is hard if its class has a lower probability than this.
        bootstrap_floor: the share of an image's labelled pixels that are kept at least, the hardest first.
        auxiliary: weight of the auxiliary classifier's loss, for merge: released.
        precision: as lightning-fabric names it.
        accumulate: in how many parts, one after the other, each device goes through its share of a batch.
        clip: largest norm of the gradient; null does not clip.
        ema: decay of the moving average of the weights, for example 0.999; null keeps none.
        channels_last: memory format of images and weights.
        compile: run the network through torch.compile.
        freeze_norm: batch norms keep their statistics.
        norm_momentum: share of a batch in the running statistics of batch norms; null leaves the network's own.
        hold_middle: the middle one of an odd number of kernels keeps its center at 0.
        seed: of weights, order, augmentation and dropout.
        checkpoint_every: steps.
        validate_every: steps; 0 validates at the end only.
        validate_last: validate after the last step.
        log_every: steps.
        keep: how many of the newest checkpoints stay, besides the best.
    """

    steps: int = 40_000
    batch_size: int = 16
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    schedule: Literal["poly", "cosine"] = "poly"
    power: float = 0.9
    warmup: int = 0
    receptive_field_lr: float = 1.0
    head_lr: float = 1.0
    loss: Literal["cross_entropy", "bootstrapped"] = "cross_entropy"
    bootstrap_threshold: float = 0.7
    bootstrap_floor: float = 0.0625
    auxiliary: float = 0.0
    precision: Literal["32-true", "16-mixed", "bf16-mixed"] = "32-true"
    accumulate: int = 1
    clip: float | None = None
    ema: float | None = None
    channels_last: bool = False
    compile: bool = False
    freeze_norm: bool = False
    norm_momentum: float | None = None
    hold_middle: bool = False
    seed: int = 0
    checkpoint_every: int = 500
    validate_every: int = 5000
    validate_last: bool = True
    log_every: int = 50
    keep: int = 2

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "checkpoint_every", "log_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lr", "power", "receptive_field_lr", "head_lr"):
            if getattr(self, name) <= 0:
                raise ValueError(f"train.{name} must be positive, got {getattr(self, name)}")
        for name in ("momentum", "weight_decay", "auxiliary", "warmup", "seed", "validate_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"train.{name} must not be negative, got {getattr(self, name)}")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"train.clip must be positive, or null for no clipping, got {self.clip}")
        if self.norm_momentum is not None and not 0 < self.norm_momentum <= 1:
            raise ValueError(f"train.norm_momentum must be above 0 and at most 1, or null, got {self.norm_momentum}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"train.ema must lie between 0 and 1, or be null for no average, got {self.ema}")
        _require_finite("train", self)


def _require_finite(section: str, config: Any) -> None:
    """Raise if a number of ``config`` is infinite or none."""
    for name, value in vars(config).items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{section}.{name} must be finite, got {number}")


@dataclass(frozen=True)
class Config:
    """All that decides what a run learns."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if self.train.auxiliary and self.model.merge != "released":
            raise ValueError(
                f"train.auxiliary is set to {self.train.auxiliary}, but only model.merge=released has such a classifier"
            )

    def to_dict(self) -> dict[str, Any]:
        """Give nested dicts of numbers, strings, lists and None."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # makes lists of tuples
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Make the settings again of which :meth:`to_dict` gave ``values``."""
        try:
            sections = {
                name: kind(**{key: tuple(x) if isinstance(x, list) else x for key, x in values[name].items()})
                for name, kind in _SECTIONS.items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"these settings are not of this version of malleable ({error})") from error
        return cls(**sections)


_SECTIONS: dict[str, type[Any]] = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig}


def parse_config(values: Mapping[str, Any]) -> Config:
    """Make settings of sections by name, checked as the command line does; what is left out has its default."""
    return Config.from_dict(checked(Config, {name: _plain(name, value) for name, value in values.items()}))


def _plain(name: str, value: Any) -> Any:
    """Give the setting ``name`` as a file could hold it: paths become text, NumPy's numbers Python's, tuples lists."""
    if isinstance(value, Mapping):
        return {key: _plain(f"{name}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, inner) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{name} must be a number, text, true, false, null, list or section, got {type(value).__name__}")


def build_network(
    config: ModelConfig, num_classes: int, *, pretrained: bool = True, trust: bool = False, places: Sequence[str] = ()
) -> Network:
    """Build the network of ``config``.

    Args:
        pretrained: False looks for no weights, because others follow.
        trust: a factory of one's own is imported only with this: where ``config`` is one's own, or one asked for it.
        places: names of the convolutions that see depth in a foreign network, if they are known already; else
            ``config.where`` finds them.
    """
    weights = config.pretrained if pretrained else False
    shared = (num_classes, config.conv, config.kernels)
    if config.network != DEEPLAB:
        return foreign(
            config.network,
            *shared,
            places or config.where,
            config.depth_input,
            config.options,
            pretrained=weights,
            trust=trust,
            fill_depth=config.fill_depth,
            smooth_depth=config.smooth_depth,
            **config.layer_options(),
        )
    return deeplabv3plus(
        config.backbone,
        *shared,
        config.stages,
        config.output_stride,
        config.merge,
        config.depth_input,
        weights,
        width=config.width,
        skip=config.skip,
        channels=config.channels,
        depth_encoder=config.depth_encoder,
        fill_depth=config.fill_depth,
        smooth_depth=config.smooth_depth,
        **config.layer_options(),
    )
