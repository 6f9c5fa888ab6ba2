"""``malleable pull`` gets a trained network from the Hugging Face hub or a folder."""

from __future__ import annotations

from pathlib import Path

from malleable.inference.load import CONFIG, WEIGHTS, load_trained
from malleable.inference.share import HUB, check_folder, share


def pull(source: str, out: str, revision: str | None = None, overwrite: bool = False) -> None:
    """Get a network that was pushed, and see that it loads. Nothing in it is executed.

    Args:
        source: hf://owner/name, a repository on the Hugging Face hub, or a folder.
        out: the folder to write, which every command takes as a checkpoint.
        revision: a branch, tag or commit of the repository.
        overwrite: replace files that the folder holds.
    """
    check_folder(Path(out), overwrite)
    folder = source
    if source.startswith(HUB):
        from huggingface_hub import snapshot_download

        folder = snapshot_download(source.removeprefix(HUB), revision=revision, allow_patterns=[WEIGHTS, CONFIG])
    elif not Path(source).is_dir():
        raise FileNotFoundError(f"there is no folder {source}; a repository on the hub is written hf://owner/name")
    if not (Path(folder) / WEIGHTS).is_file():
        raise ValueError(f"{source} has no {WEIGHTS}; files of other formats are not taken, they could run code")
    share(load_trained(folder), Path(out), overwrite)
    print(f"{out} is ready; use it wherever a command takes a checkpoint")
