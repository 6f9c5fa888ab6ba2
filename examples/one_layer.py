"""One malleable layer learns how far a hidden one sees: its loss falls while its kernels move to where they are needed.

Run it with ``python examples/one_layer.py``. It takes some seconds on a laptop.
"""

import torch
from torch import nn

import malleable as mb


def scene(batch: int = 8, size: int = 24) -> tuple[torch.Tensor, mb.Geometry]:
    """Random features over a staircase of depth: neighbours lie in front, at the same depth and behind."""
    stairs = torch.randint(-6, 7, (batch, 1, size // 3, size // 3)).repeat_interleave(3, -1).repeat_interleave(3, -2)
    depth = 2 + 0.02 * stairs + 0.02 * torch.randn(batch, 1, size, size)
    return torch.randn(batch, 4, size, size), mb.Geometry(depth, focal=60.0)


def main(steps: int = 400) -> tuple[float, float]:
    """Train the layer and, for comparison, a plain convolution. Returns their final losses."""
    torch.manual_seed(0)
    teacher = mb.MalleableConv2d(4, 4, 3, padding=1, centers=[-4.0, -2.0, 0.0, 2.0, 4.0])
    student = mb.MalleableConv2d(4, 4, 3, padding=1)
    plain = nn.Conv2d(4, 4, 3, padding=1)
    optimizer = torch.optim.Adam([*student.parameters(), *plain.parameters()], lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    print("step   malleable   plain Conv2d   (squared error, 1 = nothing learned)")
    for step in range(steps + 1):
        x, geometry = scene()
        with torch.no_grad():
            target = teacher(x, geometry)
        variance = target.var()
        losses = [(y - target).square().mean() / variance for y in (student(x, geometry), plain(x))]
        if step % 50 == 0:
            print(f"{step:4}   {losses[0].item():9.4f}   {losses[1].item():12.4f}")
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        schedule.step()
    print("\nwhere the three kernels look, in grid cells along the depth axis (behind, same depth, in front)")
    for name, layer in (("start", mb.MalleableConv2d(1, 1, 1)), ("learned", student), ("hidden", teacher)):
        centers = "  ".join(f"{value:5.2f}" for value in layer.centers[1:-1].tolist())
        print(f"  {name:8} {centers}")
    return losses[0].item(), losses[1].item()


if __name__ == "__main__":
    main()
