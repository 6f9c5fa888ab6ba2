"""``malleable evaluate`` gives mIoU and accuracies of a network on a data set, as table, JSON and CSV."""

from __future__ import annotations

import csv as csv_format
import io
import json as json_format
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from malleable.data.faults import chosen_stresses
from malleable.data.open import open_dataset
from malleable.files import check_free, whole_file, write_whole
from malleable.inference.evaluate import evaluate_network
from malleable.inference.load import load_trained
from malleable.inference.stress import stress_network
from malleable.reports.statistics import number
from malleable.reports.tables import print_cells
from malleable.runs.scores import RESULTS, Protocol, Scores
from malleable.runs.settings import UsageError

STRESS = "stress.png"


def evaluate(
    checkpoint: str,
    dataset: str | None = None,
    split: str | None = None,
    scales: tuple[float, ...] = (1.0,),
    flip: bool = False,
    window: tuple[int, int] | None = None,
    overlap: float = 1 / 3,
    stress: bool = False,
    faults: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
    out: str | None = None,
    csv: str | None = None,
    confusion: str | None = None,
    json: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    workers: int = 2,
    trust: bool = False,
) -> None:
    """Measure mIoU, pixel accuracy, mean accuracy and the IoU of each class.

    Args:
        checkpoint: a checkpoint, a run's folder, a folder with model.safetensors and config.json, or hf://owner/name.
        dataset: a folder with dataset.json, Cityscapes' tree, rooms or streets; the one it was trained on by default.
        split: of the data set; the one that training validated on by default.
        scales: for multi-scale scores, for example --scales 0.75 1 1.25; the camera is rescaled with the image.
        flip: show every scale mirrored as well; probabilities are averaged.
        window: height and width of a window that slides over the image instead of the whole image at once.
        overlap: the least share of a window that its neighbour sees too.
        stress: measure also what is left when depth has another scale, noise, holes, 8 bits, a shift, another focal
            length or is gone, and draw it beside results.json as stress.png, beside x.json as x-stress.png.
        faults: the faults to try with --stress, by the names that its table has; all of them by default.
        also: other splits of the data set whose mIoU to measure too, kept in the JSON file.
        out: JSON file to write; results.json in the run's folder by default.
        csv: CSV file to write, a line per class.
        confusion: CSV file to write, the confusion matrix in pixels.
        json: print JSON instead of a table.
        overwrite: replace files that exist.
        device: auto, cpu, cuda or cuda:N.
        workers: threads that read samples ahead.
        trust: import the package.module:factory that the checkpoint names as its network, and run it.
    """
    protocol = Protocol(scales, flip, window, overlap)
    if faults and not stress:
        raise UsageError(f"faults has no effect without --stress, got {'; '.join(faults)}; add it, or leave faults out")
    chosen = chosen_stresses(faults)
    trained = load_trained(checkpoint, device, trust)
    data = trained.config.data if trained.config is not None else None
    dataset = dataset or (data.root if data is not None else None)
    if dataset is None:
        raise ValueError(f"{checkpoint} does not say what it was trained on; add --dataset FOLDER and --split NAME")
    split = split or (data.val if data is not None else "val")
    results_path = Path(out) if out is not None else trained.run / RESULTS if trained.run is not None else None
    drawn = None
    if stress and results_path is not None:
        drawn = results_path.with_name(STRESS if results_path.name == RESULTS else f"{results_path.stem}-{STRESS}")
    files = [Path(file) for file in (results_path, drawn, csv, confusion) if file is not None]
    for file in files:
        check_free(file, overwrite)
    if len({file.resolve() for file in files}) < len(files):
        raise ValueError(f"out, csv and confusion must be different files, got {', '.join(map(str, files))}")
    samples, others = open_dataset(dataset, split), {name: open_dataset(dataset, name) for name in also}
    for name, unscored in {split: samples, **others}.items():
        if not unscored.labelled:
            raise ValueError(f"{unscored.name}/{name} has no labels, so there are no scores; choose another split")
    if len(samples.classes) == len(trained.classes) and tuple(samples.classes) != trained.classes:
        print(f"note: the classes of {samples.name} have other names than those of training", file=sys.stderr)
    scores = evaluate_network(
        trained.net, samples, protocol, split=split, step=trained.step, workers=workers, progress=True
    )
    if stress:
        left = stress_network(trained.net, samples, protocol, scores.miou, chosen, split=split, workers=workers)
        scores = replace(scores, stress=left)
    for name, other in others.items():
        found = evaluate_network(trained.net, other, protocol, split=name, workers=workers, progress=True)
        scores = replace(scores, splits={**scores.splits, name: found.miou})
    text = json_format.dumps(scores.to_dict(), indent=1)
    try:  # before the files, which may fail; and they follow even if nobody reads on what is printed
        if json:
            print(text)
        else:
            show(scores)
    finally:
        contents = (f"{text}\n", classes_csv(scores), confusion_csv(scores))
        for path, content in zip((results_path, csv, confusion), contents, strict=True):
            if path is not None:
                write_whole(Path(path), content.encode())
        if drawn is not None:
            draw_stress(scores, drawn)


def classes_csv(scores: Scores) -> str:
    """Give a line per class, one of the means and one over all pixels, each with the setting it was measured in."""
    setting = (scores.dataset, scores.split, str(scores.protocol), scores.step)
    heading = ["dataset", "split", "setting", "step", "class", "iou", "accuracy"]
    return _csv([heading, *([*setting, *line] for line in _lines(scores))])


def confusion_csv(scores: Scores) -> str:
    """Give the pixels by true class (line) and predicted class (column)."""
    assert scores.confusion is not None
    names, title = list(scores.iou), f"{scores.dataset} {scores.split}, {scores.protocol}: true class"
    lines = zip(names, scores.confusion.tolist(), strict=True)
    return _csv([[title, *names], *([name, *pixels] for name, pixels in lines)])


def show(scores: Scores) -> None:
    """Print a table of all classes."""
    step = "" if scores.step is None else f", step {scores.step}"
    lines = [[name, number(iou), number(accuracy)] for name, iou, accuracy in _lines(scores)]
    title = f"{scores.dataset} {scores.split}{step}: {scores.protocol}"
    print_cells([["class", "IoU", "accuracy"], *lines[:-2], [], *lines[-2:]], title, "percent")
    for title, kind, own, found in (
        ("when depth is not what it was", "fault", "none", scores.stress),
        ("on other splits", "split", scores.split, scores.splits),
    ):
        if found:
            lines = [[name, number(miou)] for name, miou in {own: scores.miou, **found}.items()]
            print_cells([[kind, "mIoU"], *lines], title, "percent")


def draw_stress(scores: Scores, path: Path) -> None:
    """Draw mIoU against the strength of each fault into a PNG file."""
    from malleable.figures.stress import stress  # matplotlib is imported only when something is drawn
    from malleable.figures.style import save

    with whole_file(path) as file:
        save(stress({"this network": (scores.miou, scores.stress)}), file, "png")


def _lines(scores: Scores) -> list[tuple[str, float | None, float | None]]:
    """Give IoU and accuracy of each class, then their means, then what there is over all pixels."""
    classes = [(name, scores.iou[name], scores.accuracy[name]) for name in scores.iou]
    return [*classes, ("mean", scores.miou, scores.mean_accuracy), ("all pixels", None, scores.pixel_accuracy)]


def _csv(lines: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv_format.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
