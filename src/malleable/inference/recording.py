"""Predictions as a recording that the Rerun viewer opens in 3-D."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
from torch import Tensor

from malleable.data.palette import Colour
from malleable.data.sample import Sample
from malleable.files import whole_path
from malleable.inference.prediction import Prediction

Write = Callable[[Sample, Prediction], None]


@contextmanager
def recorded(
    write: Write, path: str | None, classes: Sequence[str], palette: Sequence[Colour], overwrite: bool = False
) -> Iterator[Write]:
    """Give a ``write`` that also puts what it is given into the recording ``path``; without a path, ``write`` itself.

    The recording has a step of the timeline ``image`` for each image: the camera with picture, depth and labels, and
    the points of known depth twice, in the picture's colours and in the labels'. It is there whole or not at all.
    """
    if path is None:
        yield write
        return
    target = Path(path)
    if target.exists() and not overwrite:
        raise FileExistsError(f"rerun: {target} exists; choose another name or --overwrite")
    try:
        import rerun
    except ImportError as error:
        raise ValueError("rerun needs the Rerun SDK; install it with pip install rerun-sdk") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    steps = count()
    with whole_path(target) as part, rerun.RecordingStream("malleable") as stream:
        stream.save(part)
        stream.log("world", rerun.ViewCoordinates.RDF, static=True)
        legend = [(index, *about) for index, about in enumerate(zip(classes, palette, strict=True))]
        stream.log("world", rerun.AnnotationContext(legend), static=True)

        def both(sample: Sample, prediction: Prediction) -> None:
            write(sample, prediction)
            stream.set_time("image", sequence=next(steps))
            depth = sample.depth.as_subclass(Tensor)[0]
            image, labels = prediction.image, prediction.labels.astype(np.uint8)
            height, width = sample.camera.size
            focal = [sample.camera.fx, sample.camera.fy]
            center = [sample.camera.cx + 0.5, sample.camera.cy + 0.5]  # the corner is 0 there
            stream.log("id", rerun.TextDocument(sample.id))
            lens = rerun.Pinhole(width=width, height=height, focal_length=focal, principal_point=center)
            stream.log("world/camera", lens)
            stream.log("world/camera/image", rerun.Image(image))
            stream.log("world/camera/depth", rerun.DepthImage(depth.numpy(), meter=1.0))
            stream.log("world/camera/labels", rerun.SegmentationImage(labels))
            known = (depth > 0).numpy()
            points = sample.camera.back_project(depth).permute(1, 2, 0).numpy()[known]
            stream.log("world/colours", rerun.Points3D(points, colors=image[known]))
            stream.log("world/labels", rerun.Points3D(points, class_ids=labels[known]))

        yield both
        stream.flush()
        stream.disconnect()
