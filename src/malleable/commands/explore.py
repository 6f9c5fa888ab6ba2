"""``malleable explore`` opens a page that shows which neighbours a layer takes, and what networks make of them."""

from __future__ import annotations

import re
import signal
import sys
import time
import webbrowser
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from os.path import abspath
from pathlib import Path

from malleable.data.loose import Flags, find_items
from malleable.data.open import open_dataset, splits_of
from malleable.data.sample import SampleDataset
from malleable.data.synthetic import SyntheticScenes
from malleable.inference.load import Trained, load_trained

_GRADIO = (6, 31)  # the oldest that will do, as in pyproject.toml
_WORLDS, _SIZE = ("rooms", "streets"), (240, 320)


def explore(
    runs: tuple[str, ...] = (),
    data: str | None = None,
    split: str | None = None,
    image: str | None = None,
    depth: str | None = None,
    unit: str | None = None,
    camera: str | None = None,
    focal: float | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    browser: bool = True,
    device: str = "auto",
    trust: bool = False,
) -> None:
    """Open a page: click a pixel and see which neighbours each kernel takes, in the image and in space.

    Needs no network: without one it shows a layer alone, on synthetic scenes. Ctrl-C ends it.

    Args:
        runs: trained networks to label with, each a run's folder, a checkpoint, a folder with model.safetensors and
            config.json, or hf://owner/name, for example malleable explore runs/x runs/rgb.
        data: scenes to pick from: a folder with dataset.json, or Cityscapes' tree; what the first network was trained
            on by default, if it is here. Synthetic scenes are always there.
        split: of the data set; by default val, else its last.
        image: an image, or a folder of images, to begin with.
        depth: the 16-bit PNG or .npy of the image, or the folder with one of the same name for each image.
        unit: of depth files: mm, m, 0.1mm, 1/5000m, or metres per count; that of .npy is m unless said here.
        camera: JSON file with width, height, fx, fy, cx, cy.
        focal: focal length in pixels, for fx and fy.
        host: who may see the page: by default nobody but this machine; 0.0.0.0 is everybody who can reach it.
        port: of the page; by default the first that is free from 7860 on.
        browser: open the page in a browser.
        device: auto, cpu, cuda or cuda:N.
        trust: import the package.module:factory that a checkpoint names as its network, and run it.
    """
    _require_gradio()
    from malleable.explorer.explorer import Explorer, Source, layers_of  # matplotlib comes with it
    from malleable.explorer.scenes import items_of
    from malleable.explorer.server import served

    if image is None and (depth, unit, camera, focal) != (None,) * 4:
        raise ValueError("depth, unit, camera and focal are those of --image FILE; add it")
    networks = {name: load_trained(run, device, trust) for name, run in _named(runs).items()}
    sources = {}
    if image is not None:
        depth_file, camera_file = (None if name is None else Path(name) for name in (depth, camera))
        items = find_items([image], None, Flags(depth_file, unit, camera_file, focal))
        sources[Path(abspath(image)).name] = Source(items)
    dataset = _dataset(data, split, next(iter(networks.values()), None))
    if dataset is not None:
        name = dataset.name if dataset.name not in sources else f"{dataset.name}, the data set"
        sources[name] = Source(items_of(dataset), dataset.classes)
    for world in _WORLDS:
        scenes = SyntheticScenes(world, _SIZE, seed=1, length=200)  # type: ignore[arg-type]
        sources.setdefault(f"synthetic-{world}", Source(items_of(scenes), scenes.classes))
    explorer = Explorer(sources, networks, layers_of(networks))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with served(explorer, host, port) as address:
            print(f"the page is at {address}; Ctrl-C ends it", flush=True)
            if host not in ("127.0.0.1", "localhost", "::1"):
                print(f"warning: whoever reaches {host} sees these images and can hand in others", file=sys.stderr)
            if browser:
                webbrowser.open(address)
            while True:
                time.sleep(3600)
    except KeyboardInterrupt:
        print("the page is closed", file=sys.stderr)


def _require_gradio() -> None:
    """Raise if Gradio is not installed, or too old."""
    try:
        found = version("gradio")
    except PackageNotFoundError:
        found = "none"
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _GRADIO:
        needed = ".".join(map(str, _GRADIO))
        raise ValueError(
            f'explore needs Gradio {needed} or newer, and {found} is installed; pip install "gradio>={needed}", or '
            'pip install ".[explore]" in a clone of malleable'
        )


def _named(runs: Sequence[str]) -> dict[str, str]:
    """Give each run the shortest name that is its own: that of its folder, else all of its path."""
    folders = {abspath(run): run for run in runs}
    short = [Path(folder).name for folder in folders]
    return {name if short.count(name) == 1 else run: run for name, run in zip(short, folders.values(), strict=True)}


def _dataset(data: str | None, split: str | None, trained: Trained | None) -> SampleDataset | None:
    """Open the data set that is named, else what the network was validated on, if that is here."""
    if data is not None:
        splits = splits_of(data)
        return open_dataset(data, split or ("val" if "val" in splits else splits[-1]))
    if split is not None:
        raise ValueError("split is that of a data set; add --data FOLDER")
    if trained is None or trained.config is None:
        return None
    try:
        return open_dataset(trained.config.data.root, trained.config.data.val)
    except (OSError, ValueError) as error:
        print(f"note: what the network was trained on cannot be shown: {error}", file=sys.stderr)
        return None
