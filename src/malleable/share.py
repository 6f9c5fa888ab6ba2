"""``malleable push`` and ``pull``: weights as safetensors and their config, in a folder or on the Hugging Face hub."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from malleable.trained import CONFIG, WEIGHTS, Trained, load_trained, save_trained

HUB = "hf://"
CARD = "README.md"
FILES = (WEIGHTS, CONFIG, CARD)
"""All that is ever shared."""


def push(checkpoint: str, target: str, private: bool = False, overwrite: bool = False) -> None:
    """Share a trained network: model.safetensors, config.json and a model card, and nothing else.

    The hub's token is taken from HF_TOKEN or from 'hf auth login'.

    Args:
        checkpoint: a checkpoint, a run's folder, or a folder with model.safetensors and config.json.
        target: a folder, or hf://owner/name, a repository on the Hugging Face hub.
        private: make a new repository private.
        overwrite: replace files that the folder holds.
    """
    trained = load_trained(checkpoint)
    if not target.startswith(HUB):
        _into(trained, Path(target), overwrite)
        print(f"{target} is ready; 'malleable pull {target} OUT' and every command that takes a checkpoint read it")
        return
    from huggingface_hub import HfApi

    api = HfApi()
    with TemporaryDirectory() as temporary:
        _write(trained, Path(temporary))
        repository = api.create_repo(target.removeprefix(HUB), private=private, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=repository, folder_path=temporary, allow_patterns=list(FILES), commit_message="Weights and config"
        )
    print(f"{repository} is on the hub: {commit}")


def pull(source: str, out: str, revision: str | None = None, overwrite: bool = False) -> None:
    """Get a network that was pushed, and see that it loads. Nothing in it is executed.

    Args:
        source: hf://owner/name, a repository on the Hugging Face hub, or a folder.
        out: the folder to write, which every command takes as a checkpoint.
        revision: a branch, tag or commit of the repository.
        overwrite: replace files that the folder holds.
    """
    _check_free(Path(out), overwrite)
    folder = source
    if source.startswith(HUB):
        from huggingface_hub import snapshot_download

        folder = snapshot_download(source.removeprefix(HUB), revision=revision, allow_patterns=[WEIGHTS, CONFIG])
    elif not Path(source).is_dir():
        raise FileNotFoundError(f"there is no folder {source}; a repository on the hub is written hf://owner/name")
    if not (Path(folder) / WEIGHTS).is_file():
        raise ValueError(f"{source} has no {WEIGHTS}; files of other formats are not taken, they could run code")
    _into(load_trained(folder), Path(out), overwrite)
    print(f"{out} is ready; use it wherever a command takes a checkpoint")


def card(trained: Trained) -> str:
    """The model card: what the network is, what it learned from, how to use it."""
    config: Any = trained.net._hub_mixin_config
    rows = [f"| {name} | {_literal(value)} |" for name, value in sorted(config.items())]
    learned = f" It was trained on {_literal(trained.dataset)}" if trained.dataset else ""
    learned += f" for {trained.step} steps." if learned and trained.step is not None else "." if learned else ""
    return "\n".join(
        [
            "---",
            "library_name: malleable",
            "pipeline_tag: image-segmentation",
            "tags: [rgb-d, semantic-segmentation]",
            "---",
            "",
            "# RGB-D scene parsing with malleable",
            "",
            f"DeepLabv3+ for {len(trained.classes)} classes: {', '.join(map(_literal, trained.classes))}.{learned}",
            "",
            "| setting | value |",
            "|---|---|",
            *rows,
            "",
            "```sh",
            "malleable pull hf://OWNER/NAME model",
            "malleable predict model image.png --depth depth.png --unit mm --focal 525 --out labels",
            "```",
            "",
        ]
    )


def _literal(value: object) -> str:
    """``value`` in Markdown that shows it as it is, in one line: no markup, no HTML."""
    text = escape(" ".join(str(value).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", text)


def _into(trained: Trained, folder: Path, overwrite: bool) -> None:
    """Write a network's files into ``folder``, all of them or none."""
    _check_free(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        _write(trained, Path(temporary))
        folder.mkdir(exist_ok=True)
        for name in FILES:
            (Path(temporary) / name).replace(folder / name)


def _write(trained: Trained, folder: Path) -> None:
    save_trained(trained, folder)
    (folder / CARD).write_text(card(trained), encoding="utf-8")


def _check_free(folder: Path, overwrite: bool) -> None:
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give the name of a folder")
    taken = [name for name in FILES if (folder / name).exists()]
    if taken and not overwrite:
        raise FileExistsError(f"{folder} holds {', '.join(taken)} and is left as it is; choose another or --overwrite")
