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
# # Your own folder, from nothing to a prediction
#
# Images, depth and labels become a data set; a small network learns from it; it labels an image it has not seen.
# Synthetic rooms stand in for your own pictures.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import malleable as mb
from malleable.cli import main
from malleable.data import FolderWriter, Sample
from malleable.inference.load import load_trained
from malleable.inference.probabilities import probabilities

work = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Write the folder
#
# A sample is an image (3, H, W) uint8, depth (1, H, W) in metres with 0 where unknown, a label (H, W) with 255 where
# there is none, and a camera. Fill in your own here.

# %%
yours = mb.data.SyntheticScenes("rooms", size=(48, 64), length=24)
writer = FolderWriter(work / "mine", "mine", yours.classes, yours.palette)
for index in range(len(yours.ids)):
    shot = yours[index]
    writer.write(Sample(shot.image, shot.depth, shot.label, shot.camera, id=f"shot-{index:03}"))
ids = [f"shot-{index:03}" for index in range(len(yours.ids))]
writer.finish({"train": ids[:20], "val": ids[20:]})

# %% [markdown]
# ## Look through it
#
# `malleable check` reads every file and names what is wrong. Commands can be called from Python like this, or in a
# shell.

# %%
assert main(["check", str(work / "mine")]) == 0

# %% [markdown]
# ## Train
#
# A few steps of a small network; give it more of both for real data.

# %%
run = work / "run"
settings = ["--model.backbone", "resnet10t", "--model.pretrained", "false", "--data.root", str(work / "mine")]
settings += ["--data.crop", "[48,64]", "--train.steps", "12", "--train.batch_size", "4", "--train.lr", "0.05"]
assert main(["train", *settings, "--out", str(run)]) == 0

# %% [markdown]
# ## Predict
#
# From files, as a shell would, and in Python.

# %%
assert main(["predict", str(run), str(work / "mine"), "--split", "val", "--out", str(work / "labels")]) == 0

trained = load_trained(run)
sample = mb.data.FolderDataset(work / "mine", "val")[0]
labels = probabilities(trained.net, sample).argmax(0)
figure, axes = plt.subplots(1, 3, figsize=(10, 2.8))
colours = torch.tensor(trained.palette)
truth = torch.where(sample.label < len(colours), sample.label, 0)
pictures = {"image": sample.image.permute(1, 2, 0), "truth": colours[truth], "after 12 steps": colours[labels]}
for axis, (name, picture) in zip(axes, pictures.items(), strict=True):
    axis.imshow(picture)
    axis.set_title(name)
plt.show()
