"""What the page answers to what is done on it. Nothing here knows how the page is made."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from malleable.data.loose import Item
from malleable.data.sample import Sample
from malleable.data.tv_tensors import IGNORE
from malleable.explorer.labels import html, label
from malleable.explorer.layer import Layer
from malleable.explorer.scenes import Fault, with_focal
from malleable.figures.inspection import Seeing, neighbours, seeing_layers
from malleable.inference.load import Trained


@dataclass(frozen=True)
class Source:
    """Holds scenes to pick from, and the names of the classes that their labels mean."""

    items: Sequence[Item]
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Scene:
    """Holds a sample as it is, as it is shown, and the pixel (x, y) that is looked at."""

    clean: Sample
    shown: Sample
    pixel: tuple[int, int]

    @classmethod
    def of(cls, sample: Sample, layer: Layer) -> Scene:
        """Begin with ``sample``, at a pixel whose neighbours ``layer`` takes apart."""
        module = layer.module(layer.dilation, layer.taps // 2 * layer.dilation)
        seeing = Seeing("", "", layer.rate, module, layer.fill_depth, layer.smooth_depth)
        return cls(sample, sample, neighbours(seeing, sample).pixel)

    def spoilt(self, fault: Fault, focal: float) -> Scene:
        """Show it with something wrong with its depth, and with a focal length."""
        return replace(self, shown=with_focal(fault(self.clean), focal))

    def refocused(self, focal: float) -> Scene:
        """Show it with another focal length, depth as it is shown."""
        return replace(self, shown=with_focal(self.shown, focal))


@dataclass(frozen=True)
class Explorer:
    """Holds what there is to look at, each by the name that the page shows: scenes, networks, and their layers."""

    sources: Mapping[str, Source]
    networks: Mapping[str, Trained]
    layers: Mapping[str, Layer]

    def __post_init__(self) -> None:
        known = {name: trained.classes for name, trained in self.networks.items()}
        if len(set(known.values())) > 1:
            counts = ", ".join(f"{name} knows {len(classes)}" for name, classes in known.items())
            raise ValueError(f"networks are compared by their labels, but their classes differ: {counts}")

    def pick(self, name: str, number: int, layer: Layer) -> Scene:
        """Read a scene; labels of other classes than the networks' are left out."""
        chosen = self.sources[name]
        sample = chosen.items[min(max(int(number), 0), len(chosen.items) - 1)].load()
        if chosen.classes not in {trained.classes for trained in self.networks.values()}:
            sample = replace(sample, label=torch.full_like(sample.label, IGNORE))
        return Scene.of(sample, layer)

    def labelled(self, scene: Scene) -> str:
        """Show what the networks make of a scene, as HTML; nothing without networks."""
        if not self.networks:
            return ""
        first = next(iter(self.networks.values()))
        return html(label(self.networks, scene.clean, scene.shown), first.classes, first.palette)


def layers_of(networks: Mapping[str, Trained]) -> dict[str, Layer]:
    """Describe the layers of ``networks`` that the page can show, by the names of both."""
    found = {}
    for name, trained in networks.items():
        for seeing in seeing_layers(trained.net):
            try:
                found[f"{name}: {seeing.title}"] = Layer.of(seeing)
            except ValueError as error:
                warnings.warn(f"{name}: {error}", stacklevel=2)
    return found
