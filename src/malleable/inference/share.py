"""A trained network as a folder to share: weights as safetensors, their config and a model card, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from malleable.inference.load import CARD, CONFIG, FILES, WEIGHTS, Trained

_CARD = """---
library_name: malleable
pipeline_tag: image-segmentation
tags: [rgb-d, semantic-segmentation]
---

# RGB-D scene parsing with malleable

{network} for {count} classes: {classes}.{learned}

| setting | value |
|---|---|
{settings}

```sh
malleable predict hf://OWNER/NAME image.png --depth depth.png --unit mm --focal 525 --out labels
```
"""


def share(trained: Trained, folder: Path, overwrite: bool = False) -> None:
    """Write a network's files into ``folder``, all of them or none."""
    with files_into(folder, overwrite) as temporary:
        _write(trained, temporary)


@contextmanager
def files_into(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Give a folder to write a network's files to; they move to ``folder`` once all are there."""
    check_folder(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        yield Path(temporary)
        folder.mkdir(exist_ok=True)
        for file in Path(temporary).iterdir():
            file.replace(folder / file.name)


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raise if ``folder`` cannot be written, before the work that leads to it begins."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give the name of a folder")
    taken = [name for name in FILES if (folder / name).exists()]
    if taken and not overwrite:
        raise FileExistsError(f"{folder} holds {', '.join(taken)} and is left as it is; choose another or --overwrite")


def _write(trained: Trained, folder: Path) -> None:
    from safetensors.torch import save_model

    about = {
        "format": "pt",
        "classes": json.dumps(list(trained.classes)),
        "palette": json.dumps([list(colour) for colour in trained.palette]),
        "dataset": json.dumps(trained.dataset),
        "step": json.dumps(trained.step),
        **({} if trained.scores is None else {"scores": json.dumps(trained.scores.to_dict())}),
    }
    save_model(trained.net, str(folder / WEIGHTS), metadata=about)
    (folder / CONFIG).write_text(json.dumps(trained.net.settings, indent=2, sort_keys=True) + "\n")
    (folder / CARD).write_text(card(trained), encoding="utf-8")


def card(trained: Trained) -> str:
    """Write the model card: what the network is, what it learned from, how to use it."""
    settings = [f"| {name} | {_literal(value)} |" for name, value in sorted(trained.net.settings.items())]
    learned = f" It was trained on {_literal(trained.dataset)}" if trained.dataset else ""
    learned += f" for {trained.step} steps." if learned and trained.step is not None else "." if learned else ""
    classes = ", ".join(map(_literal, trained.classes))
    network = _literal(trained.net.settings.get("network", "DeepLabv3+"))
    return _CARD.format(
        network=network, count=len(trained.classes), classes=classes, learned=learned, settings="\n".join(settings)
    )


def _literal(value: object) -> str:
    """Write ``value`` in Markdown that shows it as it is, in one line: no markup, no HTML."""
    text = escape(" ".join(str(value).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", text)
