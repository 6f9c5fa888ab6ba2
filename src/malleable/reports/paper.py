"""Holds the paper's results: mIoU and pixel accuracy of every method that a config can describe.

Xing, Wang, Zeng: Malleable 2.5D Convolution, ECCV 2020, Tables 2–7 and section 2 of the appendix. Table 1, what the
methods cost, is in :mod:`malleable.models.cost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from malleable.models.foreign import DEEPLAB
from malleable.runs.config import Config, ModelConfig

_BACKBONES = {"resnet50s": "ResNet-50", "resnet101s": "ResNet-101"}
_BUDGETS = {"NYUDv2": "40k iterations", "Cityscapes": "60k iterations"}


@dataclass(frozen=True)
class PaperRow:
    """Holds one method on one data set; ``several_scales`` says that it was measured on such, and mirrored."""

    table: str
    data: Literal["NYUDv2", "Cityscapes"]
    model: ModelConfig
    miou: float
    pixel_accuracy: float
    several_scales: bool = False

    @property
    def label(self) -> str:
        """Say what the scores were reached with, to stand beside them."""
        protocol = "multi-scale + flip" if self.several_scales else "single scale"
        backbone = _BACKBONES[self.model.backbone]
        return f"{self.table}: {self.data} full size, {backbone}, {_BUDGETS[self.data]}, {protocol}"


_RGB, _DEPTH_AWARE, _CONV25D = ModelConfig(conv=None), ModelConfig(conv="depth_aware"), ModelConfig(conv="conv25d")
_ONE, _THREE, _FIVE = ModelConfig(kernels=1), ModelConfig(kernels=3), ModelConfig(kernels=5)

ROWS = (
    PaperRow("Table 2", "NYUDv2", _RGB, 44.56, 73.01),
    PaperRow("Table 2", "NYUDv2", _DEPTH_AWARE, 46.69, 74.27),
    PaperRow("Tables 2 and 4", "NYUDv2", _ONE, 47.08, 75.13),
    PaperRow("Table 2", "NYUDv2", _CONV25D, 48.23, 75.73),
    PaperRow("Tables 2 and 4 to 7", "NYUDv2", _THREE, 48.80, 76.03),
    PaperRow("Table 2", "Cityscapes", _RGB, 79.94, 96.34),
    PaperRow("Table 2", "Cityscapes", _DEPTH_AWARE, 79.01, 96.32),
    PaperRow("Table 2", "Cityscapes", _ONE, 80.26, 96.40),
    PaperRow("Table 2", "Cityscapes", _CONV25D, 78.63, 96.29),
    PaperRow("Table 2", "Cityscapes", _THREE, 80.81, 96.51),
    PaperRow("Table 3", "NYUDv2", _THREE, 49.7, 76.3, several_scales=True),
    PaperRow("Table 3", "NYUDv2", ModelConfig("resnet101s"), 50.9, 76.9, several_scales=True),
    PaperRow("Table 4", "NYUDv2", _FIVE, 48.17, 75.59),
    PaperRow("Table 5", "NYUDv2", ModelConfig(learnable=()), 48.28, 75.68),
    PaperRow("Table 5", "NYUDv2", ModelConfig(learnable=("centers",)), 48.33, 75.74),
    PaperRow("Table 5", "NYUDv2", ModelConfig(learnable=("centers", "temperature")), 48.62, 75.91),
    PaperRow("Table 6", "NYUDv2", ModelConfig(centers=(-4, -2, 0, 2, 4)), 48.66, 75.94),
    PaperRow("Table 7", "NYUDv2", ModelConfig(stages=(2, 3)), 48.27, 75.83),
    PaperRow("Table 7", "NYUDv2", ModelConfig(stages=(4, 5)), 48.34, 75.77),
    PaperRow("Table 7", "NYUDv2", ModelConfig(stages=(3, 4, 5)), 48.58, 75.93),
    PaperRow("appendix", "NYUDv2", ModelConfig(centers=(-1, -0.5, 0, 0.5, 1)), 48.42, 75.78),
    PaperRow("appendix", "NYUDv2", ModelConfig(temperature=0.5), 48.69, 75.81),
    PaperRow("appendix", "NYUDv2", ModelConfig(temperature=2.0), 48.74, 75.83),
)


def paper_row(config: Config, several_scales: bool = False) -> PaperRow | None:
    """Find the paper's scores for the method of ``config`` on its kind of data; None if the paper has none.

    The kind of data is told from the name of its folder. Backbone, image size and training may differ: the row's label
    says what the paper had. A row of the same backbone goes before others, then one measured on as many scales.
    """
    model = config.model
    added = (model.depth_input, model.depth_encoder, model.smooth_depth)
    if model.network != DEEPLAB or added != (None, None, 0):
        return None
    name = Path(config.data.root).name.lower()
    data = "NYUDv2" if name.startswith("nyu") else "Cityscapes" if name.startswith("cityscapes") else None
    found = [row for row in ROWS if row.data == data and _method(row.model) == _method(model)]
    return min(
        found,
        key=lambda row: (row.model.backbone != model.backbone, row.several_scales != several_scales),
        default=None,
    )


def _method(model: ModelConfig) -> tuple[object, ...]:
    """Give what the paper's tables tell apart."""
    if model.conv is None:
        return (None,)
    if model.conv == "depth_aware":
        return (model.conv, set(model.stages))
    kernels = model.kernels
    centers = model.centers or tuple(k - (kernels + 1) / 2 for k in range(kernels + 2))
    return (model.conv, set(model.stages), kernels, centers, model.temperature, set(model.learnable))
