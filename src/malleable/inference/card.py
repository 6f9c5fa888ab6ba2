"""The model card of a network: for people what it is and where it ends, for the hub what it was measured with."""

from __future__ import annotations

import math
import re
from html import escape
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from malleable.inference.load import Trained
from malleable.models.foreign import is_own
from malleable.models.summary import is_scale_free, sees_depth
from malleable.runs.scores import SCORES

_METRICS = {"miou": "mean_iou", "pixel_accuracy": "accuracy", "mean_accuracy": "mean_accuracy"}
"""Scores by the names that the hub has for them."""

_BODY = """# RGB-D scene parsing with malleable

{network} for {count} classes: {classes}.{learned}

```sh
malleable predict hf://OWNER/NAME image.png --depth depth.png{unit} --focal 525 --out labelled{trust}
```
{code}
{scores}
## Limits

- It knows these classes, images like those it learned from{on}, and nothing else; every pixel gets one of them.
{limits}
## Settings

| setting | value |
|---|---|
{settings}
"""


def card(trained: Trained, license: str | None = None, base_model: str | None = None, name: str = "network") -> str:
    """Write the card of ``trained``.

    Args:
        license: as the hub names it, for example apache-2.0.
        base_model: the network on the hub that its training began with.
        name: of the network, for the hub's list of results.
    """
    data = ModelCardData(
        license=license,
        library_name="malleable",
        pipeline_tag="image-segmentation",
        tags=["rgb-d", "semantic-segmentation"],
        datasets=[_id(trained.dataset)] if trained.dataset else None,
        base_model=base_model,
        model_name=_plain(name),
        eval_results=_results(trained) or None,
    )
    return f"---\n{data.to_yaml()}\n---\n\n{_body(trained)}"


def _results(trained: Trained) -> list[EvalResult]:
    scores = trained.scores
    if scores is None:
        return []
    protocol = scores.protocol
    how: dict[str, Any] = {"scales": list(protocol.scales), "flip": protocol.flip}
    if protocol.window is not None:
        how["window"] = list(protocol.window)
    return [
        EvalResult(
            task_type="image-segmentation",
            task_name="Semantic segmentation",
            dataset_type=_id(scores.dataset),
            dataset_name=_plain(scores.dataset),
            dataset_split=_plain(scores.split),
            metric_type=_METRICS[key],
            metric_name=f"{title} in percent, {protocol}",
            metric_value=round(getattr(scores, key), 4),
            metric_args=how,
        )
        for key, title in SCORES.items()
        if math.isfinite(getattr(scores, key))
    ]


def _body(trained: Trained) -> str:
    net = trained.net
    network = net.settings.get("network", "DeepLabv3+")
    own = is_own(network)
    learned = f" It was trained on {literal(trained.dataset)}" if trained.dataset else ""
    learned += f" for {trained.step} steps." if learned and trained.step is not None else "." if learned else ""
    limits = []
    if sees_depth(net):
        limits.append(
            "- Depth must belong to the image pixel by pixel, and the focal length be that of the image as it is."
        )
        limits.append(
            "- Depth in any unit will do, but a shift of all depths, or a wrong focal length, changes the labels."
            if is_scale_free(net)
            else "- Depth must be in metres."
        )
        if trained.scores is None or not trained.scores.stress:
            limits.append("- How it does with noise, holes or other faults of depth was not measured.")
    return _BODY.format(
        network=literal(network),
        count=len(trained.classes),
        classes=", ".join(map(literal, trained.classes)),
        learned=learned,
        unit="" if is_scale_free(net) else " --unit mm",
        trust=" --trust" if own else "",
        code=f"\nIt is built by {literal(network)}, whose code you need, and which --trust runs.\n" if own else "",
        scores=_scores(trained),
        on=f" in {literal(trained.dataset)}" if trained.dataset else "",
        limits="\n".join(limits) + "\n" if limits else "",
        settings="\n".join(f"| {key} | {literal(value)} |" for key, value in sorted(net.settings.items())),
    )


def _scores(trained: Trained) -> str:
    """Write what was measured, and with which protocol, and what faults of depth leave of it, and other splits."""
    scores = trained.scores
    if scores is None:
        return "Its scores were not measured.\n"
    lines = [f"Measured on {literal(scores.setting)}, in percent:", "", "| score | |", "|---|---|"]
    lines += [f"| {title} | {getattr(scores, key):.2f} |" for key, title in SCORES.items()]
    for title, kind, own, found in (
        ("Robustness", "fault of depth", "none", scores.stress),
        ("Other splits", "split", scores.split, scores.splits),
    ):
        if found:
            lines += ["", f"## {title}", "", f"| {kind} | mIoU |", "|---|---|"]
            lines += [f"| {literal(name)} | {miou:.2f} |" for name, miou in {own: scores.miou, **found}.items()]
    return "\n".join(lines) + "\n"


def literal(value: object) -> str:
    """Write ``value`` in Markdown that shows it as it is, in one line: no markup, no HTML."""
    text = escape(" ".join(str(value).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", text)


def _plain(name: str) -> str:
    """Leave only what stands for itself in YAML and HTML."""
    return " ".join(re.sub(r"[^\w\s.,+()/-]", " ", name).split()) or "unknown"


def _id(name: str) -> str:
    """Make a data set's name one that the hub can have."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "unknown"
