# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One layer and its receptive field
#
# A malleable convolution has K kernels that line up along the depth axis. This notebook shows which neighbours each
# of them takes, and what changes when you move its centers or its temperature.

# %%
import matplotlib.pyplot as plt
import torch

import malleable as mb

sample = mb.data.SyntheticScenes("rooms", size=(120, 160))[3]
geometry = mb.Geometry(sample.depth[None], focal=sample.camera.focal)

# %% [markdown]
# ## Along the depth axis
#
# `receptive_field(d)` is the share of a neighbour that each kernel takes, by its relative depth `d`: positive in
# front of the pixel, negative behind it, in cells of the layer's own grid.

# %%
d = torch.linspace(-4, 4, 200)
settings = {
    "as it starts": {},
    "temperature 0.2": {"temperature": 0.2},
    "wider centers": {"centers": [-4.0, -2.0, 0.0, 2.0, 4.0]},
}
figure, axes = plt.subplots(1, len(settings), figsize=(11, 3), sharey=True)
for axis, (name, setting) in zip(axes, settings.items(), strict=True):
    layer = mb.MalleableConv2d(3, 8, 3, padding=1, **setting)
    axis.plot(d, layer.receptive_field(d).detach().T)
    axis.set(title=name, xlabel="relative depth d")
plt.show()

# %% [markdown]
# ## In an image
#
# `assign` gives the same for every pixel and every tap, here for the tap to the right. Flat walls belong to the
# middle kernel; at the edges of things the neighbours go to the kernels in front or behind, or to none.

# %%
layer = mb.MalleableConv2d(3, 8, 3, padding=1)
share = layer.assign(geometry, sample.depth.shape[-2:]).detach() / layer.scales.view(1, -1, 1, 1, 1)
right_of_center = 5  # of the taps 0 … 8, row after row
figure, axes = plt.subplots(1, 4, figsize=(12, 2.6))
axes[0].imshow(sample.image.permute(1, 2, 0))
for axis, kernel, name in zip(axes[1:], range(3), ("behind", "same depth", "in front"), strict=True):
    axis.imshow(share[0, kernel, right_of_center].detach(), vmin=0, vmax=1)
    axis.set_title(name)
plt.show()

# %% [markdown]
# ## It is a convolution
#
# The output has the shape that `Conv2d` gives, everything has a gradient, and without depth it is an ordinary
# convolution.

# %%
image = sample.image[None].float() / 255
y = layer(image, geometry)
y.square().mean().backward()
print(y.shape, layer.centers.grad)

plain = torch.nn.Conv2d(3, 8, 3, padding=1)
converted = mb.MalleableConv2d.from_conv2d(plain)
no_depth = mb.Geometry(torch.zeros(1, 1, 120, 160), focal=sample.camera.focal)
difference = (converted(image, no_depth) - plain(image)).abs().max()
print(f"without depth it differs from the convolution it was made of by {difference:.1e}")
assert difference < 1e-5
