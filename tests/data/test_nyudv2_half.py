"""The half-size NYUDv2 set, where it stands beside the repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from malleable.cli import main
from malleable.data import FolderDataset, nyudv2, step_loader, train_transform

ROOT = Path(__file__).parents[3] / "shared" / "nyudv2-half"
pytestmark = pytest.mark.skipif(not (ROOT / "dataset.json").exists(), reason="nyudv2-half is not beside the repository")


def test_its_splits_and_classes_are_the_standard_ones():
    for split, numbers in nyudv2.splits().items():
        data = FolderDataset(ROOT, split)
        assert data.ids == [f"{number:04d}" for number in numbers]
        assert data.classes == nyudv2.classes()


def test_the_packaged_mapping_is_the_published_one():
    published = json.loads((ROOT.parent / "nyudv2-meta.json").read_text())
    known = nyudv2.raw_to_class()
    assert [known[name] + 1 for name in published["raw_names"]] == published["raw_to_40"]


def test_a_sample():
    sample = FolderDataset(ROOT, "train")[0]
    assert sample.image.shape == (3, 240, 320)
    assert 0.5 < sample.depth[sample.depth > 0].median() < 10
    assert sample.camera.focal == pytest.approx(nyudv2.camera().focal / 2)


def test_batches_for_training():
    loader = step_loader(FolderDataset(ROOT, "train"), train_transform(crop=(160, 160)), batch_size=4, steps=2)
    for batch in loader:
        assert torch.isfinite(batch.image).all()
        assert ((batch.label < 40) | (batch.label == 255)).all()


@pytest.mark.slow
def test_it_passes_the_check(capsys):
    assert main(["check", str(ROOT)]) == 0
    out = capsys.readouterr().out
    assert "795 samples, 0 errors" in out
    assert "654 samples, 0 errors" in out
