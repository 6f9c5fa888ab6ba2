"""Draws ``docs/images/neighbours.png``, the README's picture: which kernel takes which neighbours of one pixel.

Run it with ``python docs/neighbours.py``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure

import malleable as mb
from malleable.figures.style import GREY, INK, kernels, legend, new_figure, save, styled

SCENE, PIXEL = 3, (112, 262)  # of the synthetic rooms; row and column
TAPS, DILATION = 7, 14


@styled
def picture() -> Figure:
    sample = mb.data.SyntheticScenes("rooms", size=(240, 320))[SCENE]
    layer = mb.MalleableConv2d(1, 1, TAPS, padding="same", dilation=DILATION)
    reach = TAPS // 2 * DILATION
    row, column = PIXEL
    offsets = torch.arange(-reach, reach + 1, DILATION)
    depth = sample.depth[0, row + offsets[:, None], column + offsets].as_subclass(torch.Tensor)
    center = float(sample.depth[0, row, column])
    unit = DILATION * center / sample.camera.focal
    known = depth > 0
    d = torch.where(known, (center - depth) / unit, 0.0)
    taken = layer.receptive_field(d).detach()  # (K, taps, taps)
    share, winner = taken.sum(0), taken.argmax(0)
    looks = kernels(layer.centers.tolist()[1:-1])
    figure, axes = new_figure(9.6, 4.3, 1, 2)
    left, right = axes[0]
    left.imshow(sample.image.permute(1, 2, 0).numpy())
    y, x = (part.numpy() for part in torch.meshgrid(row + offsets, column + offsets, indexing="ij"))
    rim = {"edgecolors": "white", "linewidths": 0.6}
    handles = []
    for k, look in enumerate(looks):
        mine = ((winner == k) & (share > 0.3)).numpy()
        handles.append(left.scatter(x[mine], y[mine], 62, look.colour, marker="s", **rim))
        right.scatter(depth.numpy()[mine], (y - row)[mine], 50, look.colour, marker="s", **rim)
    nobody = (share <= 0.3).numpy()
    hollow = {"facecolors": "none", "linewidths": 1.1}
    left.scatter(x[nobody], y[nobody], 48, marker="s", edgecolors="white", **hollow)
    none = right.scatter(depth.numpy()[nobody], (y - row)[nobody], 40, marker="s", edgecolors=GREY, **hollow)
    for axis, place in ((left, (column, row)), (right, (center, 0))):
        star = axis.scatter(*place, 170, INK, marker="*", edgecolors="white", linewidths=0.9, zorder=5)
    left.set(title="In the image: a pixel and its neighbours", xticks=[], yticks=[])
    left.grid(False)
    near, far = float(depth[known].min()) - 0.15, float(depth[known].max()) + 0.15
    axis_depth = torch.linspace(near, far, 400)
    field = layer.receptive_field((center - axis_depth) / unit).detach().numpy()
    for look, g in zip(looks, field, strict=True):
        right.fill_between(
            axis_depth.numpy(), 0, g, color=look.colour, alpha=0.25, transform=right.get_xaxis_transform(), lw=0
        )
    right.set(xlim=(near, far), ylim=(reach + 12, -reach - 12), xlabel="depth in metres", yticks=[])
    right.set(title="From the side: where the kernels look", ylabel="up and down in the image")
    names = [f"kernel that looks {look.label}" if look.place else "kernel for the same depth" for look in looks]
    legend(figure, [star, *handles, none], ["the pixel", *names, "taken by none: too far away in depth"], width=2.6)
    return figure


if __name__ == "__main__":
    with (Path(__file__).parent / "images" / "neighbours.png").open("wb") as file:
        save(picture(), file, "png")
