"""What the figures of a run show, or of several beside each other, is collected here and drawn elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor, nn

from malleable.data.open import open_dataset
from malleable.data.sample import Sample, SampleDataset
from malleable.figures import curves as draw
from malleable.figures import diagram, inspection, pictures
from malleable.figures.history import curves, field_paths
from malleable.figures.inspection import Seeing
from malleable.figures.style import Array
from malleable.inference.load import Trained, load_trained
from malleable.inference.probabilities import probabilities
from malleable.layers import MalleableConv2d
from malleable.models import DeepLabV3Plus
from malleable.models.depth_input import input_names
from malleable.models.foreign import Unavailable
from malleable.models.summary import sees_depth
from malleable.progress import parallel_map, with_progress
from malleable.runs.log import METRICS

NAMES = (
    "assigning_functions", "receptive_fields", "rebalancing", "feature_maps", "qualitative", "neighbours", "network",
    "training", "receptive_field_path",
)  # fmt: skip
"""All figures of a run, in the order to show them; each is a method of :class:`Portrait`."""

METHODS = {"depth_aware": "depth-aware", "conv25d": "2.5D", "malleable": "malleable"}

_INDOOR, _OUTDOOR, _BETWEEN = 1.0, 20.0, 8.0  # metres; the paper draws receptive fields at the first two


class Missing(ValueError):
    """Says why a run cannot have a figure."""


def run_figures(
    run: Path, dataset: SampleDataset | None = None, baseline: Path | None = None, trust: bool = False
) -> dict[str, Figure]:
    """Draw the figures of one run, by name in the order to show them; those it cannot have are not there.

    ``run`` is a folder, or anything else that ``load_trained`` takes. It is drawn on ``dataset``, by default the one it
    validated on, beside the results of ``baseline``, another run. ``trust`` is as for ``load_trained``.
    """
    portrait = Portrait(run, dataset, trust=trust)
    if baseline is not None:
        with suppress(FileNotFoundError, Unavailable):
            portrait.baseline = load_trained(baseline, "cpu", trust)
    return {name: figure for name, figure in portrait.figures(NAMES) if not isinstance(figure, Missing)}


def comparison_figures(
    runs: Mapping[str, Path], dataset: SampleDataset | None = None, trust: bool = False
) -> dict[str, Figure]:
    """Draw the figures of several runs, by the name to show, beside each other; those they cannot have are not there.

    They are drawn on ``dataset``, by default the one that the last run validated on.
    """
    portraits = {name: Portrait(run, dataset, trust=trust) for name, run in runs.items()}
    drawn = {}
    measured = {name: curves(portrait.folder) for name, portrait in portraits.items()}
    if any(measured.values()):
        drawn["training"] = draw.training(measured)
    with suppress(Missing):
        layers = _having("layers", portraits)
        drawn["receptive_fields"] = draw_fields(layers, *portraits[list(layers)[-1]].place)
    with suppress(Missing):
        nets = _having("trained", portraits)
        last = portraits[list(nets)[-1]]
        known = {name: net for name, net in nets.items() if len(net.classes) == len(last.data.classes)}
        drawn["qualitative"] = last.results(known)
    return drawn


def _having(part: str, portraits: Mapping[str, Portrait]) -> dict[str, Any]:
    """Collect ``part`` of the portraits that have it, one at least, by name."""
    found = {}
    for name, portrait in portraits.items():
        with suppress(Missing):
            found[name] = getattr(portrait, part)
    if not found:
        raise Missing(f"none of the runs has {part}")
    return found


def draw_fields(methods: Mapping[str, Sequence[Seeing]], depth: float, focal: float) -> Figure:
    """Draw the depth receptive fields of ``methods``, one below the other."""
    return draw.receptive_fields(inspection.fields_in_metres(methods, depth, focal), depth, focal)


@dataclass
class Portrait:
    """Draws a run. What a figure needs is read when it is needed; :class:`Missing` is raised if it is not there.

    Args:
        run, dataset: as for :func:`run_figures`.
        baseline: another network, whose results are shown beside those of this one.
        numbers: of the samples for pictures. Feature maps show two, neighbours one.
        layer, pixel, depth, focal, count: as ``malleable figures --help`` explains them.
        progress: show how far counting has come.
        trust: as for ``load_trained``.
    """

    run: Path
    dataset: SampleDataset | None = None
    baseline: Trained | None = None
    numbers: Sequence[int] | None = None
    layer: str | None = None
    pixel: tuple[int, int] | None = None
    depth: float | None = None
    focal: float | None = None
    count: int = 50
    progress: bool = False
    trust: bool = False

    def figures(self, names: Sequence[str]) -> Iterator[tuple[str, Figure | Missing]]:
        """Draw each of ``names``, or say why there is none."""
        for name in names:
            try:
                yield name, getattr(self, name)()
            except Missing as missing:
                yield name, missing

    def check(self) -> None:
        """Refuse what cannot be looked at, before the work begins."""
        for name, value in (("depth", self.depth), ("focal", self.focal)):
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive, got {value}")
        if self.count < 1:
            raise ValueError(f"count must be at least 1, got {self.count}")
        for number in self.numbers or ():
            if not 0 <= number < len(self.data):
                raise ValueError(f"samples must be in 0..{len(self.data) - 1} for {self.data.name}, got {number}")
        if self.layer is not None:
            _ = self.chosen
        if self.pixel is not None:
            (x, y), (height, width) = self.pixel, self.samples[0].camera.size
            if not (0 <= x < width and 0 <= y < height):
                raise ValueError(f"pixel must lie in the image of {width} × {height} pixels, got {x} {y}")

    @cached_property
    def trained(self) -> Trained:
        try:
            return load_trained(self.run, "cpu", self.trust)
        except (FileNotFoundError, Unavailable) as error:
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
        numbers = range(min(3, len(self.data))) if self.numbers is None else self.numbers
        if not numbers:
            raise Missing(f"{self.data.name} has no samples")
        return [self.data[number] for number in numbers]

    @cached_property
    def layers(self) -> list[Seeing]:
        found = inspection.seeing_layers(self.trained.net)
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
        """Find the layer to look into."""
        found = [seeing for seeing in self.layers if self.layer in (None, seeing.stage, seeing.name)]
        if not found:
            pairs = [(seeing.stage, seeing.name) for seeing in self.layers]
            names = ", ".join(name if stage == name else f"{stage} ({name})" for stage, name in pairs)
            raise ValueError(f"layer must be one of {names}, got {self.layer!r}")
        return found[0]

    @property
    def method(self) -> str:
        """Say how the network sees depth, in the paper's words."""
        settings = self.trained.net.settings
        layers = [] if settings["conv"] is None else [METHODS[settings["conv"]]]
        inputs = input_names(settings.get("depth_input"), settings.get("depth_encoder"))
        return " + ".join([*layers, *inputs]) or "RGB"

    @property
    def place(self) -> tuple[float, float]:
        """Choose depth in metres and focal length in pixels to draw receptive fields at."""
        depth, focal = self.depth, self.focal
        if depth is None:
            known = self.samples[0].depth[self.samples[0].depth > 0]
            depth = _OUTDOOR if len(known) and known.median() > _BETWEEN else _INDOOR
        return depth, self.samples[0].camera.focal if focal is None else focal

    @property
    def folder(self) -> Path:
        """Find where the metrics of the run lie."""
        with suppress(Missing):
            return self.trained.run or self.run
        return self.run

    def assigning_functions(self) -> Figure:
        start = self.malleable[0][1]
        states = {"at the start": (list(start.initial_centers), start.initial_temperature)}
        for seeing, layer in self.malleable:
            states[seeing.stage] = (layer.centers.tolist(), layer.temperature.item())
        widest = max(abs(center) for centers, _ in states.values() for center in centers)
        d = np.linspace(-widest - 1.5, widest + 1.5, 601)
        return draw.assigning_functions({title: inspection.assigning(d, *state) for title, state in states.items()})

    def receptive_fields(self) -> Figure:
        methods = {METHODS[kind]: layers for kind, layers in inspection.forerunners(self.layers).items()}
        return draw_fields(methods | {self.method: self.layers}, *self.place)

    def rebalancing(self) -> Figure:
        layers = [seeing for seeing, layer in self.malleable if layer.kernels > 1]
        if not layers:
            raise Missing("a single kernel has nothing to rebalance")
        chosen = np.unique(np.linspace(0, len(self.data) - 1, min(self.count, len(self.data))).astype(int))
        samples: Iterable[Sample] = parallel_map(self.data.__getitem__, chosen.tolist(), 1)
        if self.progress:
            samples = with_progress(samples, len(chosen), "rebalancing")
        shares = inspection.kernel_shares(layers, samples)
        counted = f"{len(chosen)} of {len(self.data)} images of {self.data.name}"
        return draw.rebalancing({s.stage: (*both, s.centers) for s, both in zip(layers, shares, strict=True)}, counted)

    def feature_maps(self) -> Figure:
        samples, seeing = self.samples[:2], self.chosen
        parts = [inspection.contributions(self.trained.net, seeing.layer, sample) for sample in samples]
        channels = inspection.telling_channels(parts[0].sum(0))
        images, chosen = [_arrays(sample)[0] for sample in samples], [part[:, channels] for part in parts]
        return pictures.feature_maps(images, chosen, seeing.centers, channels, seeing.title)

    def qualitative(self) -> Figure:
        nets = {} if self.baseline is None else {"baseline": self.baseline}
        return self.results(nets | {self.method: self.trained})

    def results(self, nets: Mapping[str, Trained]) -> Figure:
        """Draw what each of ``nets`` makes of the samples."""
        data, samples = self.data, self.samples
        for name, trained in nets.items():
            if len(trained.classes) != len(data.classes):
                known = f"{len(trained.classes)} classes but {data.name} has {len(data.classes)}"
                raise Missing(f"the network of {name!r} knows {known}")
        predictions = {
            name: [probabilities(trained.net, sample).argmax(0).numpy() for sample in samples]
            for name, trained in nets.items()
        }
        images, depths, labels = zip(*map(_arrays, samples), strict=True)
        return pictures.qualitative(images, depths, labels, predictions, data.classes, data.palette)

    def neighbours(self) -> Figure:
        sample, seeing = self.samples[0], self.chosen
        found, (image, depth, _) = inspection.neighbours(seeing, sample, self.pixel), _arrays(sample)
        return pictures.neighbours(image, depth, found, seeing.centers, seeing.title)

    def network(self) -> Figure:
        net = self.trained.net
        if not isinstance(net, DeepLabV3Plus):
            raise Missing(f"the drawing is one of DeepLabv3+, and the network is {net.settings['network']}")
        if net.settings["merge"] == "released":
            raise Missing("the drawing is one of the paper's network, and this one has the head of the released code")
        features: Any = net.backbone.model
        replaced = {
            seeing.stage: (
                *fill(seeing.name.replace(".", ". "), 18).replace(". ", ".").splitlines(),
                f"{METHODS[net.settings['conv']]}, K = {seeing.layer.kernels}",
                f"reads 1/{seeing.rate}",
                *([f"dilation {seeing.layer.dilation[0]}"] if max(seeing.layer.dilation) > 1 else []),
            )
            for seeing in inspection.seeing_layers(net)
        }
        strides, channels = features.feature_info.reduction(), features.feature_info.channels()
        stages = [
            diagram.Stage(f"res{number}", stride, count, replaced.get(f"res{number}", ()))
            for number, stride, count in zip((2, 3, 4, 5), strides[-4:], channels[-4:], strict=True)
        ]
        dilations = [module.dilation[0] for module in net.aspp.modules() if isinstance(module, nn.Conv2d)
                     and module.kernel_size != (1, 1)]  # fmt: skip
        return diagram.network(
            f"{net.settings['backbone']}, {self.method}, output stride {net.settings['output_stride']}",
            strides[-5] if len(strides) > 4 else None, stages, [1, *dilations], net.merge is not None,
            net.classifier.in_channels, net.classifier.out_channels, sees_depth(net),
        )  # fmt: skip

    def training(self) -> Figure:
        measured = curves(self.folder)
        if not measured:
            raise Missing(f"{self.folder} has no {METRICS}")
        return draw.training({self.folder.name: measured})

    def receptive_field_path(self) -> Figure:
        paths = field_paths(self.folder)
        if not paths:
            raise Missing(f"{self.folder} has no {METRICS} with centers in it")
        stages = {}
        with suppress(Missing):
            stages = {seeing.name: seeing.stage for seeing in self.layers}
        return draw.receptive_field_path({stages.get(name, name): path for name, path in paths.items()})


def _arrays(sample: Sample) -> tuple[Array, Array, Array]:
    """Return image (H, W, 3) uint8, depth (H, W) in metres and label (H, W)."""
    image, depth, label = (part.as_subclass(Tensor).numpy() for part in (sample.image, sample.depth, sample.label))
    return image.transpose(1, 2, 0), depth[0], label
