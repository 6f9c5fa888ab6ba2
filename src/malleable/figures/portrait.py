"""One run and all that figures show of it, collected from its metrics, its network and a data set when asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from malleable.data.open import open_dataset
from malleable.data.sample import Sample, SampleDataset
from malleable.figures import inspection
from malleable.figures.history import curves, field_paths
from malleable.figures.inspection import Array, Seeing, seeing_layers
from malleable.inference.load import Trained, load_trained
from malleable.inference.probabilities import probabilities
from malleable.layers import MalleableConv2d
from malleable.progress import parallel_map, with_progress
from malleable.runs.log import METRICS

if TYPE_CHECKING:  # matplotlib is imported only when something is drawn
    from matplotlib.figure import Figure

NAMES = (
    "assigning_functions", "receptive_fields", "rebalancing", "feature_maps", "qualitative", "neighbours", "network",
    "training", "receptive_field_path",
)  # fmt: skip
"""All figures of a run, in the order to show them; each is a method of :class:`Portrait`."""

METHODS = {None: "RGB", "depth_aware": "depth-aware", "conv25d": "2.5D", "malleable": "malleable"}

_INDOOR, _OUTDOOR, _BETWEEN = 1.0, 20.0, 8.0  # metres; the paper draws receptive fields at the first two


class Missing(ValueError):
    """Why a run cannot have a figure."""


@dataclass(frozen=True)
class Focus:
    """What figures look at.

    Args:
        samples: of the data set, for pictures. Feature maps show the first two, neighbours the first.
        layer: res2 … res5, or its name in the backbone, for feature maps and neighbours; the first by default.
        pixel: (x, y) in the image, whose neighbours are shown; by default one whose neighbours differ most.
        depth: metres, for receptive fields; by default 1 m, or 20 m if half of the first sample is beyond 8 m.
        focal: pixels, for receptive fields; that of the first sample by default.
        count: the number of samples over which pixels are counted.
        progress: show how far counting has come.
    """

    samples: Sequence[int] = (0, 1, 2)
    layer: str | None = None
    pixel: tuple[int, int] | None = None
    depth: float | None = None
    focal: float | None = None
    count: int = 50
    progress: bool = False


class Portrait:
    """A run to draw. What a figure needs is read when it is needed; :class:`Missing` is raised if it is not there.

    Args:
        run: the run's folder, or anything that :func:`malleable.inference.load.load_trained` takes.
        dataset: to draw from; the one that the run validated on by default.
        baseline: another network, whose results are shown beside those of this one.
    """

    def __init__(
        self,
        run: Path,
        dataset: SampleDataset | None = None,
        baseline: Trained | None = None,
        focus: Focus | None = None,
    ) -> None:
        self.run, self.dataset, self.baseline, self.focus = run, dataset, baseline, focus or Focus()

    @cached_property
    def trained(self) -> Trained:
        try:
            return load_trained(self.run)
        except FileNotFoundError as error:
            raise Missing(str(error)) from error

    @cached_property
    def data(self) -> SampleDataset:
        if self.dataset is not None:
            return self.dataset
        config = self.trained.config
        if config is None:
            raise Missing(f"{self.run} does not say what it was trained on; add --data FOLDER")
        try:
            return open_dataset(config.data.root, config.data.val)
        except (OSError, ValueError) as error:
            raise Missing(f"its data set cannot be read ({error}); add --data FOLDER") from error

    @cached_property
    def samples(self) -> list[Sample]:
        found = [self.data[index] for index in self.focus.samples if 0 <= index < len(self.data)]
        if not found:
            raise Missing(f"samples {list(self.focus.samples)} are not among the {len(self.data)} of {self.data.name}")
        return found

    @cached_property
    def layers(self) -> list[Seeing]:
        found = seeing_layers(self.trained.net)
        if not found:
            raise Missing("the network has no layer that sees depth")
        return found

    @property
    def malleable(self) -> list[tuple[Seeing, MalleableConv2d]]:
        found = [(seeing, seeing.layer) for seeing in self.layers if isinstance(seeing.layer, MalleableConv2d)]
        if not found:
            raise Missing("the network has no malleable layer")
        return found

    @property
    def chosen(self) -> Seeing:
        """The layer to look into."""
        wanted = self.focus.layer
        found = [seeing for seeing in self.layers if wanted in (None, seeing.stage, seeing.name)]
        if not found:
            names = ", ".join(f"{seeing.stage} ({seeing.name})" for seeing in self.layers)
            raise ValueError(f"layer must be one of {names}, got {wanted!r}")
        return found[0]

    @property
    def pixel(self) -> tuple[int, int] | None:
        """The pixel whose neighbours are asked for."""
        pixel = self.focus.pixel
        height, width = self.samples[0].camera.size
        if pixel is not None and not (0 <= pixel[0] < width and 0 <= pixel[1] < height):
            raise ValueError(f"pixel must lie in the image of {width} × {height} pixels, got {pixel[0]} {pixel[1]}")
        return pixel

    @property
    def method(self) -> str:
        """How the network sees depth, in the paper's words."""
        return METHODS[self.trained.net.settings["conv"]]

    @property
    def place(self) -> tuple[float, float]:
        """Depth in metres and focal length in pixels to draw receptive fields at."""
        depth, focal = self.focus.depth, self.focus.focal
        if depth is None:
            known = self.samples[0].depth[self.samples[0].depth > 0]
            depth = _OUTDOOR if len(known) and known.median() > _BETWEEN else _INDOOR
        return depth, self.samples[0].camera.focal if focal is None else focal

    def assigning_functions(self) -> Figure:
        from malleable.figures.curves import Assigning, assigning_functions

        start = self.malleable[0][1]
        states = {"at the start": (list(start.initial_centers), start.initial_temperature)}
        for seeing, layer in self.malleable:
            states[seeing.stage] = (layer.centers.tolist(), layer.temperature.item())
        widest = max(abs(center) for centers, _ in states.values() for center in centers)
        d = np.linspace(-widest - 1.5, widest + 1.5, 601)
        return assigning_functions(
            {
                title: Assigning(d, *inspection.assigning(d, centers, t), np.array(centers), t)
                for title, (centers, t) in states.items()
            }
        )

    def receptive_fields(self) -> Figure:
        methods = {METHODS[kind]: layers for kind, layers in inspection.forerunners(self.layers).items()}
        return draw_fields(methods | {self.method: self.layers}, *self.place)

    def rebalancing(self) -> Figure:
        from malleable.figures.curves import rebalancing

        layers = [seeing for seeing, layer in self.malleable if layer.kernels > 1]
        if not layers:
            raise Missing("a single kernel has nothing to rebalance")
        chosen = np.unique(np.linspace(0, len(self.data) - 1, min(self.focus.count, len(self.data))).astype(int))
        samples: Iterable[Sample] = parallel_map(self.data.__getitem__, chosen.tolist(), 1)
        if self.focus.progress:
            samples = with_progress(samples, len(chosen), "rebalancing")
        shares = inspection.kernel_shares(layers, samples)
        counted = f"{len(chosen)} of {len(self.data)} images of {self.data.name}"
        return rebalancing({s.stage: (*both, s.centers) for s, both in zip(layers, shares, strict=True)}, counted)

    def feature_maps(self) -> Figure:
        from malleable.figures.curves import feature_maps

        samples, seeing = self.samples[:2], self.chosen
        parts = [inspection.contributions(self.trained.net, seeing.layer, sample) for sample in samples]
        channels = inspection.telling_channels(parts[0].sum(0))
        return feature_maps([picture(sample) for sample in samples], [part[:, channels] for part in parts],
                            seeing.centers, channels, f"{seeing.stage}, {seeing.name}")  # fmt: skip

    def qualitative(self) -> Figure:
        nets = {} if self.baseline is None else {"baseline": self.baseline}
        return draw_results(self, nets | {self.method: self.trained})

    def neighbours(self) -> Figure:
        from malleable.figures.curves import neighbours as draw

        sample, seeing = self.samples[0], self.chosen
        found = inspection.neighbours(seeing, sample, self.pixel)
        return draw(picture(sample), metres(sample), found.taps, found.g, found.inside, found.centre, seeing.centers,
                    f"{seeing.stage}, {seeing.name}")  # fmt: skip

    def network(self) -> Figure:
        from malleable.figures.curves import Stage, network

        net = self.trained.net
        features: Any = net.backbone.model
        replaced = {
            seeing.stage: (
                *fill(seeing.name.replace(".", ". "), 18).replace(". ", ".").splitlines(),
                f"{self.method}, K = {seeing.layer.kernels}",
                f"reads 1/{seeing.rate}",
                *([f"dilation {seeing.layer.dilation[0]}"] if max(seeing.layer.dilation) > 1 else []),
            )
            for seeing in seeing_layers(net)
        }
        strides, channels = features.feature_info.reduction(), features.feature_info.channels()
        stages = [
            Stage(f"res{number}", stride, count, replaced.get(f"res{number}", ()))
            for number, stride, count in zip((2, 3, 4, 5), strides[-4:], channels[-4:], strict=True)
        ]
        dilations = [module.dilation[0] for module in net.aspp.modules() if isinstance(module, nn.Conv2d)
                     and module.kernel_size != (1, 1)]  # fmt: skip
        return network(
            f"{net.settings['backbone']}, {self.method}, output stride {net.settings['output_stride']}",
            strides[-5] if len(strides) > 4 else None, stages, [1, *dilations], net.merge is not None,
            net.classifier.in_channels, net.classifier.out_channels,
        )  # fmt: skip

    @property
    def folder(self) -> Path:
        """Where the metrics of the run lie."""
        try:
            return self.trained.run or self.run
        except Missing:
            return self.run

    def training(self) -> Figure:
        from malleable.figures.curves import training

        measured = curves(self.folder)
        if not measured:
            raise Missing(f"{self.folder} has no {METRICS}")
        return training({self.folder.name: measured})

    def receptive_field_path(self) -> Figure:
        from malleable.figures.curves import FieldPath, receptive_field_path

        paths = field_paths(self.folder)
        if not paths:
            raise Missing(f"{self.folder} has no {METRICS} with centers in it")
        try:
            stages = {seeing.name: seeing.stage for seeing in self.layers}
        except Missing:
            stages = {}
        return receptive_field_path({stages.get(name, name): FieldPath(**path) for name, path in paths.items()})


def draw_fields(methods: Mapping[str, Sequence[Seeing]], depth: float, focal: float) -> Figure:
    """The depth receptive fields of ``methods``, one below the other."""
    from malleable.figures.curves import Field, receptive_fields

    fields = inspection.fields_in_metres(list(methods.values()), depth, focal)
    return receptive_fields(
        {
            name: {stage: Field(*field) for stage, field in found.items()}
            for name, found in zip(methods, fields, strict=True)
        },
        depth,
        focal,
    )


def draw_results(portrait: Portrait, nets: Mapping[str, Trained]) -> Figure:
    """What each of ``nets`` makes of the samples of ``portrait``."""
    from malleable.figures.curves import qualitative

    data, samples = portrait.data, portrait.samples
    for name, trained in nets.items():
        if len(trained.classes) != len(data.classes):
            known = f"{len(trained.classes)} classes but {data.name} has {len(data.classes)}"
            raise Missing(f"the network of {name!r} knows {known}")
    predictions = {
        name: [probabilities(trained.net, sample).argmax(0).numpy() for sample in samples]
        for name, trained in nets.items()
    }
    labels = [sample.label.as_subclass(Tensor).numpy() for sample in samples]
    images, depths = [picture(sample) for sample in samples], [metres(sample) for sample in samples]
    return qualitative(images, depths, labels, predictions, data.classes, data.palette)


def picture(sample: Sample) -> Array:
    """The image as (H, W, 3) uint8."""
    pixels: Array = sample.image.as_subclass(Tensor).permute(1, 2, 0).numpy()
    return pixels


def metres(sample: Sample) -> Array:
    """The depth as (H, W)."""
    depth: Array = sample.depth.as_subclass(Tensor)[0].numpy()
    return depth
