"""Networks whose answer is known, small scenes for them, and a run as training leaves it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from malleable.data import SyntheticScenes, collate, eval_transform
from malleable.runs.checkpoint import Checkpoint, write_checkpoint
from malleable.runs.config import Config, DataConfig, ModelConfig, build_network


class Depths(nn.Module):
    """Logits from every pixel alone: colours, depth and depth / focal. Mirrors with its input."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        weight = torch.randn(classes, 5, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(weight)
        self.calls: list[tuple[tuple[int, ...], list[float]]] = []

    def forward(self, image: Tensor, depth: Tensor, focal: Tensor) -> Tensor:
        self.calls.append((tuple(image.shape), focal.tolist()))
        seen = torch.cat([image, depth, 30 * depth / focal.view(-1, 1, 1, 1)], dim=1)
        return torch.einsum("ck,nkhw->nchw", self.weight, seen)


class Columns(Depths):
    """Adds the column to the logits: does not mirror with its input."""

    def forward(self, image: Tensor, depth: Tensor, focal: Tensor) -> Tensor:
        logits = super().forward(image, depth, focal)
        logits[:, 0] += torch.arange(image.shape[-1]) / 10
        return logits


def scenes(length: int = 5) -> SyntheticScenes:
    return SyntheticScenes(size=(24, 32), length=length)


MODEL = ModelConfig("resnet10t", kernels=1, stages=(3,), pretrained=False)


def write_run(
    folder: Path, step: int = 7, ema: bool = False, root: Path | None = None, model: ModelConfig = MODEL
) -> Path:
    """A run's folder with one checkpoint of a small network with random weights, for the classes of ``scenes``.

    ``root`` is the data set that it says it was trained on.
    """
    data = scenes()
    torch.manual_seed(0)
    net = build_network(model, len(data.classes))
    batch = collate([eval_transform()(sample) for sample in (data[0], data[1], data[2])])
    with torch.no_grad():
        net.classifier.bias.zero_()  # type: ignore[union-attr]
        for _ in range(20):  # statistics of real features: the answers differ from pixel to pixel
            net(batch.image, depth=batch.depth, focal=batch.focal)
    state = net.state_dict()
    average = {name: torch.zeros_like(value) for name, value in state.items()} if ema else None
    config = Config(model, DataConfig() if root is None else DataConfig(root=str(root)))
    checkpoint = Checkpoint(config, step, state, average, data.classes, data.palette, data.name)
    write_checkpoint(folder / "checkpoints", checkpoint)
    return folder
