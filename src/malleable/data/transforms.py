"""The paper's training augmentation and plain evaluation, as torchvision v2 transforms of a Sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from malleable.data.faults import DepthFaults

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Pretrained backbones were trained with these of ImageNet; they are per channel, of values 0..1."""

SCALES = (0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
"""The paper trains with these (section 4)."""


class RandomScale(v2.Transform):  # type: ignore[misc]
    """Resizes by one of ``scales``, each as likely as the others. Sizes are rounded to whole pixels."""

    def __init__(self, scales: Sequence[float] = SCALES) -> None:
        super().__init__()
        if not scales or min(scales) <= 0:
            raise ValueError(f"scales must be positive factors, at least one, got {list(scales)}")
        self.scales = tuple(scales)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = v2.query_size(flat_inputs)
        scale = self.scales[int(torch.randint(len(self.scales), ()))]
        return {"size": [max(1, round(height * scale)), max(1, round(width * scale))]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return self._call_kernel(F.resize, inpt, params["size"])


def train_transform(
    crop: tuple[int, int] = (480, 480),
    scales: Sequence[float] = SCALES,
    flip: float = 0.5,
    faults: DepthFaults | None = None,
) -> v2.Transform:
    """Scale and crop at random, flip, spoil depth, and normalise as for ImageNet (paper, section 4, but for faults).

    The paper crops 480 × 480 from NYUDv2 and 800 × 800 from Cityscapes. Where the scaled image is smaller than
    ``crop`` (height, width) the border is grey, without depth, and ignored.
    """
    grey = {tv_tensors.Image: [255 * mean for mean in MEAN], "others": 0}
    return v2.Compose(
        [
            RandomScale(scales),
            v2.RandomCrop(crop, pad_if_needed=True, fill=grey),
            v2.RandomHorizontalFlip(flip),
            *([] if faults is None else [faults]),
            eval_transform(),
        ]
    )


def eval_transform() -> v2.Transform:
    """Only normalise as for ImageNet: uint8 0..255 becomes float32 with mean 0 and deviation 1 per channel."""
    return v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
