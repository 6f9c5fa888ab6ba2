"""Quantise an exported network to 8 bits for processors: ``python examples/int8.py model.onnx rooms int8.onnx``.

The second argument is the data whose images tell how large activations get: a folder with dataset.json, or "rooms" or
"streets" for synthetic scenes. Convolutions run in int8, weights with one scale a channel; all else stays
in float32, depth differences too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from malleable.data import Sample
from malleable.data.open import open_dataset


class Inputs(CalibrationDataReader):
    """Gives the samples as the network wants them, one after the other."""

    def __init__(self, model: Path, samples: Iterable[Sample]) -> None:
        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        self.names = {value.name for value in session.get_inputs()}
        self.inputs = self._all(samples)

    def _all(self, samples: Iterable[Sample]) -> Iterator[dict[str, np.ndarray]]:
        for sample in samples:
            focal = np.array([sample.camera.focal], np.float32)
            values = {"image": sample.image[None].numpy(), "depth": sample.depth[None].numpy(), "focal": focal}
            yield {name: values[name] for name in self.names}

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.inputs, None)


def _end_names(path: Path) -> None:
    """Let no constant's name end in a digit: the quantiser numbers its copies, and copy 43 of val_16 is val_1643."""
    model = onnx.load(path)
    for constant in model.graph.initializer:
        constant.name += "_"
    names = {constant.name[:-1]: constant.name for constant in model.graph.initializer}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    onnx.save(model, path)


def quantise(model: Path, samples: Iterable[Sample], out: Path) -> None:
    """Write ``model`` with its convolutions in int8, calibrated on ``samples``."""
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(str(model), str(prepared), skip_symbolic_shape=True)  # folds batch norms into convolutions
        _end_names(prepared)
        quantize_static(
            str(prepared),
            str(out),
            Inputs(model, samples),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Conv"],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=int, default=32)
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists and is left as it is")
    data = open_dataset(arguments.data, "train")
    quantise(arguments.model, (data[i] for i in range(min(arguments.images, len(data)))), arguments.out)
