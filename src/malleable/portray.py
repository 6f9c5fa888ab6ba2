"""``malleable figures``: the figures of a run, or of several beside each other, and their files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from malleable.data.opening import open_dataset
from malleable.data.sample import SampleDataset
from malleable.files import check_free, whole_path
from malleable.history import curves
from malleable.portrait import NAMES, Focus, Missing, Portrait, draw_fields, draw_results, picture
from malleable.trained import load_trained

if TYPE_CHECKING:  # matplotlib is imported only when something is drawn
    from matplotlib.figure import Figure

    from malleable.inspection import Array

FORMATS = ("png", "svg")


def run_figures(
    run: Path, dataset: SampleDataset | None = None, baseline: Path | None = None, samples: Sequence[int] = (0, 1, 2)
) -> dict[str, Figure]:
    """The figures of one run by name, in the order to show them; those it cannot have are not there.

    Args:
        run: its folder, or anything that ``malleable.trained.load_trained`` takes.
        dataset: to draw from; the one that the run validated on by default.
        baseline: another run, whose results are shown beside.
        samples: of the data set, for the pictures.
    """
    beside = None
    if baseline is not None:
        with suppress(FileNotFoundError):
            beside = load_trained(baseline)
    drawn = _draw(Portrait(run, dataset, beside, Focus(samples)), NAMES)
    return {name: figure for name, figure in drawn if not isinstance(figure, Missing)}


def comparison_figures(
    runs: Mapping[str, Path], dataset: SampleDataset | None = None, samples: Sequence[int] = (0, 1, 2)
) -> dict[str, Figure]:
    """The figures of several runs beside each other; those they cannot have are not there.

    Args:
        runs: the name to show → as for :func:`run_figures`.
        dataset: to draw from; the one that the last run validated on by default.
        samples: of the data set, for the pictures.
    """
    portraits = {name: Portrait(run, dataset, None, Focus(samples)) for name, run in runs.items()}
    drawn = {}
    for name, draw in (("training", _training), ("receptive_fields", _fields), ("qualitative", _results)):
        try:
            drawn[name] = draw(portraits)
        except Missing:
            continue
    return drawn


def _draw(portrait: Portrait, names: Sequence[str]) -> Iterator[tuple[str, Figure | Missing]]:
    """Each figure, or why there is none."""
    for name in names:
        try:
            yield name, getattr(portrait, name)()
        except Missing as missing:
            yield name, missing


def _training(portraits: Mapping[str, Portrait]) -> Figure:
    from malleable.figures import training

    measured = {name: curves(portrait.folder) for name, portrait in portraits.items()}
    if not any(measured.values()):
        raise Missing("no run has metrics")
    return training(measured)


def _fields(portraits: Mapping[str, Portrait]) -> Figure:
    methods = _having("layers", portraits)
    return draw_fields(methods, *portraits[list(methods)[-1]].place)


def _results(portraits: Mapping[str, Portrait]) -> Figure:
    nets = _having("trained", portraits)
    shown = portraits[list(nets)[-1]]
    classes = len(shown.data.classes)
    return draw_results(shown, {name: net for name, net in nets.items() if len(net.classes) == classes})


def _having(part: str, portraits: Mapping[str, Portrait]) -> dict[str, Any]:
    """Name → ``part`` of the portraits that have it, one at least."""
    found = {}
    for name, portrait in portraits.items():
        with suppress(Missing):
            found[name] = getattr(portrait, part)
    if not found:
        raise Missing(f"none of the runs has {part}")
    return found


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
    click: bool = False,
    depth: float | None = None,
    focal: float | None = None,
    count: int = 50,
    formats: tuple[str, ...] = FORMATS,
    overwrite: bool = False,
) -> None:
    """Draw what a trained network has learned and what it does, as PNG and SVG.

    Args:
        checkpoint: a run's folder, a checkpoint, or a folder with model.safetensors and config.json.
        data: a folder with dataset.json, Cityscapes' tree, rooms or streets; the one it was trained on by default.
        split: of the data set; the one that training validated on by default.
        out: the folder to write to.
        only: which of assigning_functions, receptive_fields, rebalancing, feature_maps, qualitative, neighbours,
            network, training and receptive_field_path, for example --only network training; all by default.
        baseline: another trained network, whose results are shown beside.
        samples: numbers of the samples to show, the first is 0; the first three by default.
        layer: res2 … res5, or a name as in the network figure, for feature maps and neighbours; the first by default.
        pixel: x and y of the pixel whose neighbours are shown; by default one whose neighbours differ.
        click: choose the pixel in a window.
        depth: metres, for receptive fields; by default 1, or 20 where half of an image is beyond 8 m.
        focal: focal length in pixels, for receptive fields; that of the first sample by default.
        count: the number of samples over which the pixels of each kernel are counted.
        formats: png, svg or both.
        overwrite: replace files that exist.
    """
    names, kinds = _checked("only", only, NAMES) or NAMES, _checked("formats", formats, FORMATS)
    focus = Focus(samples or Focus.samples, layer, pixel, depth, focal, count, progress=True)
    portrait = Portrait(Path(checkpoint), None, None if baseline is None else load_trained(baseline), focus)
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
    if click:
        portrait.focus = replace(focus, pixel=clicked(picture(portrait.samples[0])))
    _check(portrait, strict=samples is not None)
    folder = Path(out)
    if folder.is_file():
        raise ValueError(f"out must be a folder, but {folder} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        for kind in kinds:
            check_free(folder / f"{name}.{kind}", overwrite)
    written = 0
    for name, figure in _draw(portrait, names):
        if isinstance(figure, Missing):
            if only:
                raise ValueError(f"{name} cannot be drawn: {figure}")
            print(f"{name} is left out: {figure}", file=sys.stderr)
            continue
        for kind in kinds:
            _write(figure, folder / f"{name}.{kind}")
        written += 1
    print(f"{written} figures are in {folder} ({', '.join(kinds)})")


def clicked(image: Array) -> tuple[int, int]:
    """The (x, y) that the user clicks on ``image`` (H, W, 3) in a window."""
    from matplotlib import pyplot

    try:
        figure, axes = pyplot.subplots()
        headless = figure.canvas.required_interactive_framework is None
    except ImportError:  # the environment asks for a toolkit that cannot be used
        headless = True
    if headless:
        raise ValueError("click needs a display and a window toolkit for matplotlib, and finds none; use --pixel X Y")
    axes.imshow(image)
    axes.set_title("Click a pixel")
    points = figure.ginput(1, timeout=0)
    pyplot.close(figure)
    if not points:
        raise ValueError("click: no pixel was chosen; use --pixel X Y")
    x, y = points[0]
    return round(x), round(y)


def _checked(argument: str, values: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if value not in allowed:
            raise ValueError(f"{argument} must be among {', '.join(allowed)}, got {value!r}")
    return values


def _check(portrait: Portrait, strict: bool) -> None:
    """Refuse what there is not, before the work begins. ``strict``: all samples must be there."""
    focus = portrait.focus
    for name, value in (("depth", focus.depth), ("focal", focus.focal)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive, got {value}")
    if focus.count < 1:
        raise ValueError(f"count must be at least 1, got {focus.count}")
    for sample in focus.samples if strict else ():
        if not 0 <= sample < len(portrait.data):
            raise ValueError(f"samples must be in 0..{len(portrait.data) - 1} for {portrait.data.name}, got {sample}")
    if focus.layer is not None:
        _ = portrait.chosen
    if focus.pixel is not None:
        _ = portrait.pixel


def _write(figure: Figure, path: Path) -> None:
    from malleable.figures import save

    with whole_path(path) as partial:
        save(figure, str(partial), path.suffix[1:])
