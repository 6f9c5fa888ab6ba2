"""What a small network learns of a synthetic world in a minute, from colour alone and with depth as a fourth channel.

    python benchmarks/synthetic_learning.py [--world rooms] [--steps 250]

The network knows nothing of the malleable convolution: this measures the data, not the method.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from malleable.data import Batch, SyntheticScenes, collate, eval_transform, step_loader


def block(inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class Network(nn.Module):
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.fine = nn.Sequential(block(inputs, 24, 2), block(24, 24), block(24, 48, 2), block(48, 48))
        self.coarse = nn.Sequential(
            block(48, 96, 2), block(96, 96), block(96, 96, dilation=2), block(96, 96, dilation=4)
        )
        self.context = nn.Conv2d(96, 96, 1)
        self.head = nn.Sequential(block(96 + 48, 64), nn.Conv2d(64, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        coarse = self.coarse(fine)
        coarse = coarse + self.context(coarse.mean((2, 3), keepdim=True))
        coarse = F.interpolate(coarse, size=fine.shape[-2:], mode="bilinear")
        return F.interpolate(self.head(torch.cat([fine, coarse], 1)), size=x.shape[-2:], mode="bilinear")


def inputs(batch: Batch, use_depth: bool) -> Tensor:
    known = batch.depth > 0
    nearness = torch.where(known, batch.depth[known].median() / batch.depth.clamp(min=0.1), 0.0)
    return torch.cat([batch.image, nearness], 1) if use_depth else batch.image


def measure(world: str, use_depth: bool, steps: int) -> tuple[float, float]:
    """Mean IoU and pixel accuracy in percent on 50 scenes of another seed."""
    torch.manual_seed(0)
    train = SyntheticScenes(world, seed=0, length=300)
    test = SyntheticScenes(world, seed=1, length=50)
    classes = len(train.classes)
    net = Network(4 if use_depth else 3, classes)
    optimiser = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, steps)
    for batch in step_loader(train, eval_transform(), batch_size=8, steps=steps):
        loss = F.cross_entropy(net(inputs(batch, use_depth)), batch.label)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    net.eval()
    batch = collate([eval_transform()(test[index]) for index in range(len(test))])
    with torch.no_grad():
        guess = net(inputs(batch, use_depth)).argmax(1)
    joint = torch.bincount((guess * classes + batch.label).flatten(), minlength=classes**2).view(classes, classes)
    hit = joint.diagonal()
    iou = hit / (joint.sum(0) + joint.sum(1) - hit)
    return 100 * float(iou.mean()), 100 * float(hit.sum() / joint.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", default="rooms", choices=["rooms", "streets"])
    parser.add_argument("--steps", type=int, default=250)
    options = parser.parse_args()
    print("| world | input | steps of 8 | mIoU | pixel accuracy |\n|---|---|---|---|---|")
    for use_depth in (False, True):
        miou, accuracy = measure(options.world, use_depth, options.steps)
        name = "colour and depth" if use_depth else "colour"
        print(f"| {options.world} | {name} | {options.steps} | {miou:.1f} | {accuracy:.1f} |", flush=True)


if __name__ == "__main__":
    main()
