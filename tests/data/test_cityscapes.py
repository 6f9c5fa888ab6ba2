from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.files import SIZE, save
from malleable.cli import main
from malleable.data import Cityscapes, splits_of
from malleable.data.loose import Flags, find_items

RIGS = {
    "ulm_000000_000019": {"fx": 2262.52, "fy": 2265.3, "u0": 1096.98, "v0": 513.137, "baseline": 0.209313},
    "bonn_000001_000007": {"fx": 2268.36, "fy": 2225.54, "u0": 1048.64, "v0": 519.277, "baseline": 0.222126},
}


def path(root: Path, kind: str, split: str, id: str, suffix: str) -> Path:
    return root / kind / split / id.split("_")[0] / f"{id}_{suffix}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two images of the two rigs in train and val, one in test without annotations."""
    for split, ids in (("train", RIGS), ("val", RIGS), ("test", ["ulm_000000_000019"])):
        for id in ids:
            rig = RIGS[id]
            save(np.full((*SIZE, 3), 90, np.uint8), path(tmp_path, "leftImg8bit", split, id, "leftImg8bit.png"))
            save(np.full(SIZE, 10 * 256 + 1, np.uint16), path(tmp_path, "disparity", split, id, "disparity.png"))
            camera = path(tmp_path, "camera", split, id, "camera.json")
            camera.parent.mkdir(parents=True, exist_ok=True)
            intrinsic = {name: rig[name] for name in ("fx", "fy", "u0", "v0")}
            camera.write_text(json.dumps({"intrinsic": intrinsic, "extrinsic": {"baseline": rig["baseline"]}}))
            if split != "test":
                save(np.full(SIZE, 7, np.uint8), path(tmp_path, "gtFine", split, id, "gtFine_labelIds.png"))
    return tmp_path


def test_each_image_has_its_own_rig(tree):
    data = Cityscapes(tree, "train")
    assert data.ids == sorted(RIGS)
    for sample in (data[0], data[1]):
        rig = RIGS[sample.id]
        assert (sample.camera.fx, sample.camera.cy) == (rig["fx"], rig["v0"])
        assert sample.camera.size == SIZE
        assert sample.depth.unique().item() == pytest.approx(rig["baseline"] * rig["fx"] / 10, rel=1e-6)


def test_no_tiny_and_far_disparities_are_invalid(tree):
    product = RIGS["ulm_000000_000019"]["baseline"] * RIGS["ulm_000000_000019"]["fx"]
    counts = np.full(SIZE, 65535, np.uint16)
    last_valid = int(np.ceil(product / 300 * 256)) + 1
    counts[0, :5] = (0, 1, 2, last_valid - 1, last_valid)
    save(counts, path(tree, "disparity", "val", "ulm_000000_000019", "disparity.png"))
    depth = Cityscapes(tree, "val")[1].depth[0]
    assert depth[0, :4].tolist() == [0.0] * 4
    assert 290 < depth[0, 4] <= 300
    assert depth[1, 1].item() == pytest.approx(product * 256 / 65534)
    assert torch.isfinite(depth).all()


def test_all_label_ids(tree):
    ids = np.zeros(SIZE, np.uint8)
    ids.flat[:34] = range(34)
    save(ids, path(tree, "gtFine", "train", "bonn_000001_000007", "gtFine_labelIds.png"))
    label = Cityscapes(tree, "train")[0].label.flatten()[:34].tolist()
    trained = [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]
    assert [label[id] for id in trained] == list(range(19))
    assert all(label[id] == 255 for id in range(34) if id not in trained)


def test_nineteen_classes_with_colours(tree):
    data = Cityscapes(tree, "val")
    assert len(data.classes) == len(set(data.palette)) == 19
    assert (data.classes[0], data.classes[13], data.classes[18]) == ("road", "car", "bicycle")


def test_the_test_split_needs_no_labels_the_others_do(tree):
    assert (Cityscapes(tree, "test")[0].label == 255).all()
    file = path(tree, "gtFine", "val", "bonn_000001_000007", "gtFine_labelIds.png")
    file.unlink()
    with pytest.raises(FileNotFoundError, match=file.name):
        Cityscapes(tree, "val")[0]


def test_images_to_predict_need_no_labels(tree):
    file = path(tree, "gtFine", "val", "bonn_000001_000007", "gtFine_labelIds.png")
    file.unlink()
    assert [item.load().id for item in find_items([str(tree)], "val", Flags())] == Cityscapes(tree, "val").ids


def test_the_whole_tree_can_be_checked(tree, capsys):
    assert main(["check", str(tree)]) == 0
    out = capsys.readouterr().out
    assert "cityscapes/train: 2 samples, 0 errors" in out
    assert "cityscapes/test: 1 samples, 0 errors" in out


def test_errors_name_the_file(tree):
    camera = path(tree, "camera", "train", "bonn_000001_000007", "camera.json")
    camera.write_text(json.dumps({"intrinsic": {"fx": 1.0}}))
    with pytest.raises(ValueError, match=rf"{camera.name} must hold intrinsic"):
        Cityscapes(tree, "train")[0]
    intrinsic = {"fx": -1.0, "fy": 1.0, "u0": 1.0, "v0": 1.0}
    camera.write_text(json.dumps({"intrinsic": intrinsic, "extrinsic": {"baseline": 0.2}}))
    with pytest.raises(ValueError, match=rf"{camera.name}: .*fx"):
        Cityscapes(tree, "train")[0]
    save(np.ones((2, 2), np.uint16), path(tree, "disparity", "train", "ulm_000000_000019", "disparity.png"))
    with pytest.raises(ValueError, match=r"ulm_000000_000019: disparity is \(2, 2\)"):
        Cityscapes(tree, "train")[1]


def test_wrong_split_or_root(tree, tmp_path):
    with pytest.raises(ValueError, match="train, val, test"):
        Cityscapes(tree, "dev")
    with pytest.raises(FileNotFoundError, match="leftImg8bit"):
        Cityscapes(tmp_path / "nowhere", "train")


def test_a_tree_that_is_one_folder_too_deep_is_not_taken_for_an_empty_one(tmp_path):
    (tmp_path / "leftImg8bit/leftImg8bit/val").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="leftImg8bit has no folder train, val, test"):
        splits_of(tmp_path)
