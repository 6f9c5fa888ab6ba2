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
# # Convert your network
#
# `mb.convert` puts malleable convolutions into a network that exists. It starts as the network it was, and takes
# depth.

# %%
import timm
import torch

import malleable as mb

# With pretrained=True it has ImageNet's weights; random ones would start with residual units that give 0.
model = timm.create_model("resnet18", pretrained=False, zero_init_last=False, num_classes=10).eval()
net = mb.convert(model)
print(mb.summary(net))

# %% [markdown]
# ## The same answers, where depth says nothing
#
# On a flat wall, or where depth is missing, the converted network computes what the old one did. Elsewhere it sees
# the difference from the first step on.

# %%
image = torch.rand(2, 3, 96, 128)
flat = torch.full((2, 1, 96, 128), 2.0)
steps = flat + (torch.arange(128) // 16 % 2).float()
with torch.no_grad():
    before = model(image)
    same, other = net(image, depth=flat, focal=100.0), net(image, depth=steps, focal=100.0)
print(f"flat depth: {(same - before).abs().max():.1e}   steps in depth: {(other - before).abs().max():.1e}")
assert (same - before).abs().max() < 1e-4 < (other - before).abs().max()

# %% [markdown]
# ## What to convert
#
# By default the first spatial convolution of each stage, as in the paper. Names, globs or a function choose others.

# %%
last = mb.convert(model, where=["layer4.*.conv2"], kernels=5, temperature=0.5)
print(mb.summary(last))

# %% [markdown]
# ## Train it
#
# `parameter_groups` keeps weight decay off receptive fields, biases and norms.

# %%
optimizer = torch.optim.SGD(mb.parameter_groups(net.train(), lr=0.01, weight_decay=1e-4), momentum=0.9)
labels = torch.tensor([3, 7])
losses = []
for _ in range(5):
    loss = torch.nn.functional.cross_entropy(net(image, depth=steps, focal=100.0), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print([round(loss, 3) for loss in losses])
assert losses[-1] < losses[0]

# %% [markdown]
# Its weights are in an ordinary state dict, so saving and loading work as always.

# %%
again = mb.convert(model)
again.load_state_dict(net.state_dict())
