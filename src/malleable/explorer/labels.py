"""What networks make of a scene: their labels beside each other, with depth, with other depth and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np
import torch
from torch import Tensor

from malleable.data.palette import Colour
from malleable.data.sample import Sample
from malleable.data.tv_tensors import IGNORE
from malleable.explorer.scenes import data_url
from malleable.figures.style import Array
from malleable.inference.load import Trained
from malleable.inference.probabilities import probabilities
from malleable.models.summary import sees_depth

_UNLABELLED = (232, 232, 232)


@dataclass(frozen=True, eq=False)
class Labelled:
    """Holds the labels (H, W) of a scene under a title, and what there is to say about them."""

    title: str
    labels: Array
    said: str = ""


def label(networks: Mapping[str, Trained], clean: Sample, shown: Sample) -> list[Labelled]:
    """Label a scene with every network: as it is ``shown``, and with no depth where depth has any effect.

    Said is how many pixels are right, if the truth is known, and how many have another label with ``clean`` depth.
    """
    truth = clean.label.as_subclass(Tensor).numpy()
    known = truth != IGNORE
    found = [Labelled("the truth", truth)] if known.any() else []
    spoilt = not torch.equal(clean.depth, shown.depth) or clean.camera != shown.camera
    for name, trained in networks.items():
        ways = {name: shown}
        if sees_depth(trained.net):
            ways[f"{name}, no depth"] = replace(shown, depth=torch.zeros_like(shown.depth))
        for title, sample in ways.items():
            labels = _labels(trained, sample)
            said = [f"{np.mean(labels[known] == truth[known]):.1%} right"] if known.any() else []
            if sample is shown and spoilt and len(ways) > 1:
                said.append(f"{np.mean(labels != _labels(trained, clean)):.1%} changed by what is wrong with depth")
            found.append(Labelled(title, labels, ", ".join(said)))
    return found


def _labels(trained: Trained, sample: Sample) -> Array:
    return probabilities(trained.net, sample).argmax(0).cpu().numpy()


def html(found: Sequence[Labelled], classes: Sequence[str], palette: Sequence[Colour]) -> str:
    """Show labels beside each other, and below them the colours of the classes that occur."""
    table = np.full((256, 3), _UNLABELLED, np.uint8)
    table[: len(palette)] = palette
    figures = [
        f'<figure><img src="{data_url(table[one.labels])}" alt="{escape(one.title)}">'
        f"<figcaption><b>{escape(one.title)}</b> {escape(one.said)}</figcaption></figure>"
        for one in found
    ]
    shown = np.unique(np.concatenate([one.labels.ravel() for one in found]))
    names = [
        f'<li><i style="background:rgb{tuple(map(int, table[index]))}"></i>{escape(classes[index])}</li>'
        for index in shown
        if index < len(classes)
    ]
    return f'<div class="labels">{"".join(figures)}</div><ul class="classes">{"".join(names)}</ul>'
