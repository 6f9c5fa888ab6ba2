"""``malleable pull`` gets a trained network from the Hugging Face hub or a folder."""

from __future__ import annotations

from pathlib import Path
from shutil import copyfile

from malleable.inference.load import FILES, HUB, WEIGHTS, load_trained, locate
from malleable.inference.share import check_folder, files_into


def pull(source: str, out: str, revision: str | None = None, overwrite: bool = False, trust: bool = False) -> None:
    """Download a network that was pushed, and see that it loads. Nothing in it is executed.

    Every command takes hf://owner/name where it takes a checkpoint; this is for a copy of one's own.

    Args:
        source: hf://owner/name, a repository on the Hugging Face hub, or a folder.
        out: the folder to write, which every command takes as a checkpoint.
        revision: a branch, tag or commit of the repository.
        overwrite: replace files that the folder holds.
        trust: import the package.module:factory that the network names, and run it, to see that it loads.
    """
    check_folder(Path(out), overwrite)
    if revision is not None and not source.startswith(HUB):
        raise ValueError(f"revision is of a repository on the hub, and {source} is a folder; leave it out")
    if not source.startswith(HUB) and not Path(source).is_dir():
        raise FileNotFoundError(f"there is no folder {source}; a repository on the hub is written hf://owner/name")
    folder = locate(source, revision)
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{source} has no {WEIGHTS}; files of other formats are not taken, they could run code")
    load_trained(folder, "cpu", trust)
    with files_into(Path(out), overwrite) as temporary:
        for name in FILES:
            if (folder / name).is_file():
                copyfile(folder / name, temporary / name)
    print(f"{out} is ready; use it wherever a command takes a checkpoint")
