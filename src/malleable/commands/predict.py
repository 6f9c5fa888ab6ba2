"""``malleable predict`` labels images with a trained network, one by one, in constant memory."""

from __future__ import annotations

import signal
import sys
import zipfile
from collections.abc import Callable, Sequence, Set
from contextlib import closing
from dataclasses import replace
from functools import partial
from glob import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from malleable.data.image_files import is_whole_png, write_png
from malleable.data.loose import Flags, Item, find_items
from malleable.data.sample import Sample
from malleable.files import remove_partial, whole_file
from malleable.inference.estimate import DepthEstimator, Kind
from malleable.inference.load import load_trained
from malleable.inference.prediction import Prediction, label
from malleable.inference.recording import recorded
from malleable.models.summary import is_scale_free, sees_depth
from malleable.progress import parallel_map, with_progress
from malleable.runs.scores import Protocol

_KINDS = ("labels", "colour", "overlay")


def predict_items(
    items: Sequence[Item],
    answer: Callable[[Sample], Prediction],
    write: Callable[[Sample, Prediction], None],
    workers: int,
) -> int:
    """Call ``write(sample, answer(sample))`` for every item; what cannot be read is reported and left out.

    Returns how many could not be read. Only a few samples are in memory at any time, however many items there are.
    """

    def read(item: Item) -> Sample | str:
        try:
            return item.load()
        except (ValueError, TypeError, OSError) as error:
            return f"{item.id}: {error}"

    failed = 0
    with closing(with_progress(parallel_map(read, items, workers), len(items), "predict")) as samples:
        for sample in samples:
            if isinstance(sample, str):
                print(f"error: {sample}", file=sys.stderr)
                failed += 1
            else:
                write(sample, answer(sample))
    return failed


class PredictionWriter:
    """Writes ``labels/<id>.png`` (class indices), ``colour/<id>.png`` and ``overlay/<id>.png`` in one folder.

    Args:
        out: the folder; it is made when needed.
        classes: names for the probabilities' file; there are at most 256.
        keep: write ``probabilities/<id>.npz`` too: float16 ``probabilities`` (C, H, W) and ``classes`` (C,).
        resume: leave files that are there and whole as they are.
    """

    def __init__(self, out: Path, classes: Sequence[str], keep: bool = False, resume: bool = False) -> None:
        if len(classes) > 256:
            raise ValueError(f"label files hold at most 256 classes, the network has {len(classes)}")
        self.out, self.classes, self.keep, self.resume = out, tuple(classes), keep, resume

    def paths(self, id: str) -> dict[str, Path]:
        """Give the files of ``id`` by kind."""
        paths = {kind: self.out / kind / f"{id}.png" for kind in _KINDS}
        return {**paths, "probabilities": self.out / "probabilities" / f"{id}.npz"} if self.keep else paths

    def to_write(self, id: str) -> dict[str, Path]:
        """Give those files of ``id`` that are to be written, by kind."""
        paths = self.paths(id)
        return {kind: path for kind, path in paths.items() if not (self.resume and _is_whole(path))}

    def __call__(self, sample: Sample, prediction: Prediction) -> None:
        """Write what is predicted for ``sample``."""
        for kind, path in self.to_write(sample.id).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "probabilities":
                with whole_file(path) as file:
                    likely = prediction.probabilities.astype(np.float16)
                    np.savez_compressed(file, probabilities=likely, classes=np.array(self.classes))
            else:
                write_png(_picture(prediction, kind), path)


def _picture(prediction: Prediction, kind: str) -> NDArray[np.uint8]:
    if kind == "labels":
        return prediction.labels.astype(np.uint8)
    return prediction.colour if kind == "colour" else np.array(prediction.overlay())


def _estimated(item: Item, estimator: DepthEstimator) -> Sample:
    sample = item.load()
    if (sample.depth > 0).any():
        return sample
    return replace(sample, depth=estimator(sample.image.as_subclass(Tensor))[None])


def _is_whole(path: Path) -> bool:
    if path.suffix != ".npz":
        return is_whole_png(path)
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def remove_half_written(out: Path, own: Set[Path]) -> None:
    """Delete what killed processes left below ``out`` of the files ``own``; others may still be being written."""
    for part in out.rglob("*.part*"):
        begun = part.name.rpartition(".part")[0]  # x.0123… of x.0123….part.png
        if part.with_name(begun.rpartition(".")[0] + part.suffix) in own:
            remove_partial(part.parent, escape(begun))


def predict(
    checkpoint: str,
    inputs: list[str],
    out: str = "predictions",
    split: str | None = None,
    depth: str | None = None,
    unit: str | None = None,
    camera: str | None = None,
    focal: float | None = None,
    fx: float | None = None,
    fy: float | None = None,
    estimate_depth: str | None = None,
    estimate_kind: Kind | None = None,
    estimate_range: tuple[float, float] | None = None,
    scales: tuple[float, ...] = (1.0,),
    flip: bool = False,
    window: tuple[int, int] | None = None,
    overlap: float = 1 / 3,
    probabilities: bool = False,
    rerun: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    device: str = "auto",
    workers: int = 2,
    trust: bool = False,
) -> int:
    """Label images. The exit code is 1 if any could not be read; the others are done all the same.

    Depth is looked for beside the images: depth/x.png for images/x.jpg, x_depth.png for x.jpg. Unit and camera are
    those of the flags, else of cameras/x.json and dataset.json.

    Args:
        checkpoint: a checkpoint, a run's folder, a folder with model.safetensors and config.json, or hf://owner/name.
        inputs: images, folders of images, or one data set if there is a split.
        out: the folder for labels/, colour/ and overlay/.
        split: of the data set.
        depth: the 16-bit PNG or .npy of the one image, or the folder with one of the same name for each image.
        unit: of depth files: mm, m, 0.1mm, 1/5000m, or metres per count; that of .npy is m unless said here. A network
            that sees depth relative to itself needs none.
        camera: JSON file with width, height, fx, fy, cx, cy.
        focal: focal length in pixels, for fx and fy.
        fx: focal length in pixels.
        fy: focal length in pixels.
        estimate_depth: a network that estimates depth for images that have none: a folder or a name on the Hugging Face
            hub for the depth-estimation pipeline of transformers.
        estimate_kind: what it gives, if its configuration does not tell or is wrong: metric, scale (depth up to a
            factor) or disparity (up to a factor and a shift).
        estimate_range: metres of the nearest and of the farthest pixel, which turn disparity into depth.
        scales: for multi-scale predictions, for example --scales 0.75 1 1.25.
        flip: show every scale mirrored as well.
        window: height and width of a window that slides over the image instead of the whole image at once.
        overlap: the least share of a window that its neighbour sees too.
        probabilities: write probabilities/ too.
        rerun: an .rrd file for camera, depth, colours and labels, to be looked at in 3-D with the Rerun viewer.
        overwrite: replace files that exist.
        resume: go on after an interruption: files that are written and whole are left as they are.
        device: auto, cpu, cuda or cuda:N.
        workers: threads that read images ahead.
        trust: import the package.module:factory that the checkpoint names as its network, and run it.
    """
    if resume and overwrite:
        raise ValueError("resume keeps what is written, overwrite replaces it; leave one of them out")
    if resume and rerun is not None:
        raise ValueError("rerun records the images of one call, resume goes on with those of another; leave one out")
    if estimate_depth is None and (estimate_kind, estimate_range) != (None, None):
        raise ValueError("estimate_kind and estimate_range are for estimate_depth; add --estimate-depth MODEL")
    if estimate_depth is not None and depth is not None:
        raise ValueError("depth gives what estimate_depth would estimate; leave one of them out")
    depth_file, camera_file = (None if name is None else Path(name) for name in (depth, camera))
    for name, file in (("depth", depth_file), ("camera", camera_file)):
        if file is not None and not file.exists():
            raise FileNotFoundError(f"{name}: there is no {file}")
    protocol = Protocol(scales, flip, window, overlap)
    trained = load_trained(checkpoint, device, trust)
    scale_free, estimated = is_scale_free(trained.net), estimate_depth is not None
    items = find_items(inputs, split, Flags(depth_file, unit, camera_file, focal, fx, fy, scale_free, estimated))
    if scale_free and any(item.unitless for item in items):
        print("note: depth has no unit, and this network needs none: its scale cancels", file=sys.stderr)
    writer = PredictionWriter(Path(out), trained.classes, probabilities, resume)
    taken = [path for item in items for path in writer.paths(item.id).values() if path.exists()]
    if taken and not (overwrite or resume):
        raise FileExistsError(
            f"{len(taken)} files exist, for example {taken[0]}; choose another --out, --resume or --overwrite"
        )
    left = items
    if resume:
        remove_half_written(writer.out, {path for item in items for path in writer.paths(item.id).values()})
        left = [item for item in items if writer.to_write(item.id)]
    if estimate_depth is not None:
        device_of_net = next(trained.net.parameters()).device
        estimator = DepthEstimator(estimate_depth, estimate_kind, estimate_range, device_of_net)
        estimator.check(trained.net)
        print(f"note: depth is estimated by {estimator}", file=sys.stderr)
        left = [replace(item, load=partial(_estimated, item, estimator)) for item in left]
    looks, blind = sees_depth(trained.net), 0

    def answer(sample: Sample) -> Prediction:
        nonlocal blind
        if looks and not (sample.depth > 0).any():
            if not blind:
                print(f"warning: {sample.id} has no depth, so the network sees colours only", file=sys.stderr)
            blind += 1
        return label(trained.net, sample, trained.palette, protocol)

    try:
        with recorded(writer, rerun, trained.classes, trained.palette, overwrite) as write:
            failed = predict_items(left, answer, write, workers)
    except KeyboardInterrupt:
        print("stopped; the same command with --resume goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    before = f", {len(items) - len(left)} of them before" if resume else ""
    print(f"{len(items) - failed} of {len(items)} images are labelled in {out}{before} ({protocol})")
    if blind > 1:
        print(f"warning: {blind} images had no depth", file=sys.stderr)
    return int(failed > 0)
