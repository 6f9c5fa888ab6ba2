"""Data sets of RGB-D images, transforms that keep their cameras true, and the loader of training steps."""

from malleable.data.cityscapes import Cityscapes
from malleable.data.folder import FolderDataset
from malleable.data.loader import StepSampler, step_loader
from malleable.data.open import open_dataset, splits_of
from malleable.data.sample import Batch, Sample, SampleDataset, collate
from malleable.data.synthetic import SyntheticScenes
from malleable.data.transforms import RandomScale, eval_transform, train_transform
from malleable.data.tv_tensors import IGNORE, Depth, Label
from malleable.data.writer import FolderWriter

__all__ = [
    "IGNORE",
    "Batch",
    "Cityscapes",
    "Depth",
    "FolderDataset",
    "FolderWriter",
    "Label",
    "RandomScale",
    "Sample",
    "SampleDataset",
    "StepSampler",
    "SyntheticScenes",
    "collate",
    "eval_transform",
    "open_dataset",
    "splits_of",
    "step_loader",
    "train_transform",
]
