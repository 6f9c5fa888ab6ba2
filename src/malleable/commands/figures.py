"""``malleable figures`` writes the figures of a run as files."""

from __future__ import annotations

import sys
from pathlib import Path

from malleable.data.open import open_dataset
from malleable.files import check_free, whole_path
from malleable.inference.load import load_trained, locate

FORMATS = ("png", "svg")


def figures(
    checkpoint: str,
    data: str | None = None,
    split: str | None = None,
    out: str = "figures",
    only: tuple[str, ...] = (),
    baseline: str | None = None,
    samples: tuple[int, ...] | None = None,
    layer: str | None = None,
    pixel: tuple[int, int] | None = None,
    depth: float | None = None,
    focal: float | None = None,
    count: int = 50,
    formats: tuple[str, ...] = FORMATS,
    overwrite: bool = False,
    trust: bool = False,
) -> None:
    """Draw what a trained network has learned and what it does, as PNG and SVG.

    Args:
        checkpoint: a run's folder, a checkpoint, a folder with model.safetensors and config.json, or hf://owner/name.
        data: a folder with dataset.json, Cityscapes' tree, rooms or streets; the one it was trained on by default.
        split: of the data set; the one that training validated on by default.
        out: the folder to write to.
        only: which of assigning_functions, receptive_fields, rebalancing, feature_maps, qualitative, neighbours,
            network, training and receptive_field_path, for example --only network training; all by default.
        baseline: another trained network, whose results are shown beside.
        samples: numbers of the samples to show, the first is 0; the first three by default.
        layer: res2 … res5, or a name as in the network figure, for feature maps and neighbours; the first by default.
        pixel: x and y of the pixel whose neighbours are shown; by default one whose neighbours differ.
        depth: metres, for receptive fields; by default 1, or 20 where half of an image is beyond 8 m.
        focal: focal length in pixels, for receptive fields; that of the first sample by default.
        count: the number of samples over which the pixels of each kernel are counted.
        formats: png, svg or both.
        overwrite: replace files that exist.
        trust: import the package.module:factory that the checkpoint names as its network, and run it.
    """
    from malleable.figures.history import curves  # matplotlib is imported only when something is drawn
    from malleable.figures.run import NAMES, Missing, Portrait
    from malleable.figures.style import save

    names, kinds = _checked("only", only, NAMES) or NAMES, _checked("formats", formats, FORMATS)
    beside = None if baseline is None else load_trained(baseline, "cpu", trust)
    portrait = Portrait(
        locate(checkpoint), None, beside, samples or None, layer, pixel, depth, focal, count, True, trust
    )
    config = None
    try:
        config = portrait.trained.config
    except Missing:
        if not curves(portrait.folder):
            raise
    if data is not None or split is not None:
        root, val = (config.data.root, config.data.val) if config is not None else (None, "val")
        if data is None and root is None:
            raise ValueError(f"{checkpoint} does not say what it was trained on; add --data FOLDER")
        portrait.dataset = open_dataset(data or str(root), split or val)
    portrait.check()
    folder = Path(out)
    if folder.is_file():
        raise ValueError(f"out must be a folder, but {folder} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        for kind in kinds:
            check_free(folder / f"{name}.{kind}", overwrite)
    written = 0
    for name, figure in portrait.figures(names):
        if isinstance(figure, Missing):
            if only:
                raise ValueError(f"{name} cannot be drawn: {figure}")
            print(f"{name} is left out: {figure}", file=sys.stderr)
            continue
        for kind in kinds:
            with whole_path(folder / f"{name}.{kind}") as partial:
                save(figure, str(partial), kind)
        written += 1
    print(f"{written} {'figure is' if written == 1 else 'figures are'} in {folder} ({', '.join(kinds)})")


def _checked(argument: str, values: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if value not in allowed:
            raise ValueError(f"{argument} must be among {', '.join(allowed)}, got {value!r}")
    return values
