"""Tell how far a gain depends on which images it was measured on: runs of one seed against a baseline.

    python studies/trained/images.py runs/trained_nyudv2/rgb-baseline/seed1 runs/trained_nyudv2/malleable-k-3/seed1

Scores every run on the images it was validated on and draws them again, with replacement, 10,000 times: neighbours
in the list show one place, so they are drawn in blocks of ten. Between the two ends given lie 95 % of the gains.
What another training would change is not in it; seeds tell that.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from malleable.data import open_dataset
from malleable.inference.confusion import Confusion
from malleable.inference.load import load_trained
from malleable.inference.probabilities import probabilities
from malleable.reports.tables import markdown
from malleable.runs.scores import Protocol

BLOCK, TRIALS = 10, 10_000


def count(run: str) -> Tensor:
    """Count, for each block of images and each class, pixels found, labelled and predicted: (blocks, 3, C)."""
    trained = load_trained(run, "cpu")
    if trained.config is None:
        sys.exit(f"{run} does not say what it was validated on; give the folder of a run")
    dataset = open_dataset(trained.config.data.root, trained.config.data.val)
    blocks = []
    for start in range(0, len(dataset), BLOCK):
        confusion = Confusion(len(dataset.classes))
        for index in range(start, min(start + BLOCK, len(dataset))):
            sample = dataset[index]
            predicted = probabilities(trained.net, sample, Protocol()).max(0).indices
            confusion.update(predicted, sample.label.as_subclass(Tensor))
        counts = confusion.counts
        blocks.append(torch.stack([counts.diagonal(), counts.sum(1), counts.sum(0)]))
    return torch.stack(blocks).double()


def scores(counts: Tensor) -> Tensor:
    """Compute mIoU and pixel accuracy in percent: (…, 3, C) → (2, …)."""
    hits, labelled, predicted = counts.unbind(-2)
    miou = (hits / (labelled + predicted - hits)).nanmean(-1)
    return 100 * torch.stack([miou, hits.sum(-1) / labelled.sum(-1)])


def main(*runs: str) -> None:
    torch.set_num_threads(1)
    counts = torch.stack([count(run) for run in runs])  # (runs, blocks, 3, C)
    blocks = counts.shape[1]
    chosen = torch.randint(blocks, (TRIALS, blocks), generator=torch.Generator().manual_seed(0))
    draws = one_hot(chosen, blocks).sum(1).double()  # how often each draw has each block: (trials, blocks)
    found = scores(counts.sum(1))  # (2, runs)
    drawn = scores(torch.einsum("tb,rbsc->rtsc", draws, counts))  # (2, runs, trials)
    gains = found - found[:, :1]
    ends = (drawn - drawn[:, :1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=2)  # (2, 2, runs)
    cells = [["", "mIoU", "above the first", "95 % of draws", "pixel accuracy", "above the first", "95 % of draws"]]
    for place, run in enumerate(runs):
        cells.append([run])
        for which in range(2):
            cells[-1].append(f"{found[which, place]:.2f}")
            low, high = ends[:, which, place].tolist()
            cells[-1] += [f"{gains[which, place]:+.2f}", f"{low:+.2f} to {high:+.2f}"] if place else ["", ""]
    print(markdown(cells))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
