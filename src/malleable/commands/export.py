"""``malleable export`` writes a trained network as ONNX or as a torch.export program, checked before it is named."""

from __future__ import annotations

import json
import logging
import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from malleable import __version__
from malleable.data.transforms import MEAN, STD
from malleable.files import check_free, whole_path
from malleable.inference.load import Trained, load_trained
from malleable.models.summary import is_scale_free
from malleable.ops.whole import translations, whole_operators
from malleable.progress import showing

if TYPE_CHECKING:
    from torch.export import ExportedProgram

INPUTS = ("image", "depth", "focal")
OUTPUT = "logits"
TOLERANCE = 1e-3
_MAP = {0: "batch", 2: "height", 3: "width"}
_AXES = (_MAP, _MAP, {0: "batch"})
_TRACED, _CHECKED = (2, 96, 128), ((1, 97, 131), (3, 160, 64))  # batch, height, width; odd ones too

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class Deployed(nn.Module):
    """Wraps a network so that it takes the image as cameras give it, and all else as :func:`export` says."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("mean", 255 * torch.tensor(MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(STD).view(3, 1, 1), persistent=False)

    def forward(self, image: Tensor, depth: Tensor, focal: Tensor) -> Tensor:
        logits: Tensor = self.net((image.float() - self.mean) / self.std, depth=depth, focal=focal)
        return logits


def example(batch: int, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make up inputs: noise on a slanted floor with a hole in its depth."""
    random = torch.Generator().manual_seed(height)
    image = torch.randint(0, 256, (batch, 3, height, width), dtype=torch.uint8, generator=random)
    depth = torch.linspace(6, 1, height).view(1, 1, height, 1).expand(batch, 1, height, width).clone()
    depth += 0.2 * torch.rand(depth.shape, generator=random)
    depth[..., : height // 4, : width // 4] = 0
    return image, depth, width * (0.8 + 0.1 * torch.arange(batch))


def check(net: nn.Module, run: Run) -> float:
    """Find the largest difference of logits between ``net`` and what was written, at sizes it was not traced with.

    Raises RuntimeError if it exceeds 1e-3, relative to the largest logit if all are small.
    """
    worst = 0.0
    deployed = Deployed(net).eval()
    for size in _CHECKED:
        inputs = example(*size)
        with torch.no_grad():
            expected, actual = deployed(*inputs), run(*inputs)
        if actual.shape != expected.shape:
            raise RuntimeError(f"at {size} the written model gives {tuple(actual.shape)}, not {tuple(expected.shape)}")
        difference = float((actual - expected).abs().max() / expected.abs().max().clamp(1e-6, 1))
        if not difference <= TOLERANCE:  # NaN too
            raise RuntimeError(f"at {size} the written model differs from PyTorch by {difference:.1e}")
        worst = max(worst, difference)
    return worst


def write_onnx(net: nn.Module, path: Path, about: Mapping[str, str] | None = None) -> float | None:
    """Write ``net`` as ONNX, with ``about`` in its metadata_props.

    Returns how far it is from PyTorch, None if onnxruntime is not there to tell.
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise RuntimeError(f"ONNX needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    import onnx_ir.passes.common as passes
    from onnx_ir.passes import Sequential
    from onnxscript.optimizer import fold_constants

    with _quiet(), whole_operators():
        program: Any = torch.onnx.export(
            Deployed(net).eval(),
            example(*_TRACED),
            input_names=list(INPUTS),
            output_names=[OUTPUT],
            dynamic_shapes=_AXES,
            dynamo=True,
            verbose=False,
            optimize=False,
            custom_translation_table=translations(),
        )
        # Of program.optimize() only this: its rules take as long as all else, for what runtimes do as they load a file.
        fold_constants(program.model, input_size_limit=sys.maxsize, output_size_limit=sys.maxsize)
        Sequential(
            passes.RemoveUnusedNodesPass(),
            passes.RemoveUnusedOpsetsPass(),
            passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            passes.DeduplicateInitializersPass(),
            passes.CommonSubexpressionEliminationPass(),
            passes.OutputFixPass(),
            passes.NameFixPass(),
        )(program.model)
    program.model.metadata_props.update(about or {})
    with whole_path(path) as partial:
        program.save(str(partial))
        if find_spec("onnxruntime") is None:
            return None
        return check(net, _onnx_runner(partial))


def write_torch(net: nn.Module, path: Path) -> float:
    """Write ``net`` as a torch.export program (.pt2). Returns how far the file, read back, is from ``net``."""
    dynamic = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in _AXES)
    with whole_path(path) as partial:
        with _quiet():
            # PyTorch 2.7 is strict by default, and takes the layers for compiled ones, with operators of this library.
            program = torch.export.export(Deployed(net).eval(), example(*_TRACED), dynamic_shapes=dynamic, strict=False)
            _drop_ceilings(program)
            torch.export.save(program, partial)
            loaded = torch.export.load(partial).module()
        return check(net, loaded)


def _drop_ceilings(program: ExportedProgram) -> None:
    """Put n for every ceil(n / 1): timm's dilated average pooling asks for it, and torch cannot write it to a file."""
    for node in program.graph.nodes:
        quotient = node.args[0] if node.target is math.ceil else None
        if isinstance(quotient, torch.fx.Node) and quotient.target is operator.truediv and quotient.args[1] == 1:
            node.replace_all_uses_with(quotient.args[0])
    program.graph.eliminate_dead_code()


def _onnx_runner(path: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> Tensor:
        arrays = {name: tensor.numpy() for name, tensor in zip(INPUTS, inputs, strict=True)}
        return torch.from_numpy(session.run([OUTPUT], arrays)[0])

    return run


def description(trained: Trained) -> dict[str, str]:
    """Say what the numbers that go in and come out mean: lists as JSON."""
    return {
        "classes": json.dumps(trained.classes),
        "palette": json.dumps(trained.palette),
        "image": "uint8 RGB, 0..255; the model subtracts mean and divides by std itself",
        "mean": json.dumps([255 * value for value in MEAN]),
        "std": json.dumps([255 * value for value in STD]),
        "depth_unit": "any" if is_scale_free(trained.net) else "metre",
        "focal_unit": "pixel",
        "dataset": trained.dataset,
        "producer": f"malleable {__version__}",
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporters' notes on their own inner workings from the user's terminal."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def export(
    checkpoint: str,
    file: str,
    format: Literal["onnx", "torch"] | None = None,
    overwrite: bool = False,
    trust: bool = False,
) -> None:
    """Write a network for other programs, and compare it with PyTorch at two other sizes before it gets its name.

    It takes image (N, 3, H, W) uint8 RGB, depth (N, 1, H, W) float32 metres with 0 for invalid, and focal (N,) float32
    in pixels, for any N, and H and W from 33 on; it normalises the image itself. It returns logits (N, classes, H, W)
    float32. An ONNX file's metadata has the names and colours of the classes, the normalisation and the unit of depth.

    Args:
        checkpoint: a checkpoint, a run's folder, a folder with model.safetensors and config.json, or hf://owner/name.
        file: to write, model.onnx or model.pt2.
        format: onnx, or torch for a torch.export program; by default what the file's name says.
        overwrite: replace the file if it exists.
        trust: import the package.module:factory that the checkpoint names as its network, and run it.
    """
    path = Path(file)
    suffixes = {".onnx": "onnx", ".pt2": "torch"}
    if format is None and path.suffix not in suffixes:
        raise ValueError(f"file must end in .onnx or .pt2, or --format must say what it is, got {file!r}")
    chosen = format or suffixes[path.suffix]
    if suffixes.get(path.suffix, chosen) != chosen:
        raise ValueError(
            f"file ends in {path.suffix}, but format is {chosen}; leave --format out, or name it otherwise"
        )
    check_free(path, overwrite)
    trained = load_trained(checkpoint, "cpu", trust)
    with showing(path.name):
        difference = (
            write_onnx(trained.net, path, description(trained)) if chosen == "onnx" else write_torch(trained.net, path)
        )
    if difference is None:
        print(f"{path} is written, but not checked: onnxruntime is not installed")
        return
    runtime = "onnxruntime" if chosen == "onnx" else "the file read back"
    sizes = " and ".join(f"{batch}×{height}×{width}" for batch, height, width in _CHECKED)
    print(f"{path} is written; {runtime} agrees with PyTorch to {difference:.0e} at {sizes} (batch×height×width)")
