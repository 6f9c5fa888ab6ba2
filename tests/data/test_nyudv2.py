"""Preparation of NYUDv2 from a file with the official structure: HDF5 as MATLAB writes it, axes transposed."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from malleable import progress as parallel
from malleable.cli import main
from malleable.data import FolderDataset, nyudv2
from malleable.data.nyudv2 import prepare_nyudv2
from malleable.data.palette import default_palette

COUNT, HEIGHT, WIDTH = 5, 24, 32
NAMES = list(nyudv2.raw_to_class())


@pytest.fixture
def content() -> dict[str, np.ndarray]:
    """Arrays as MATLAB shows them: H × W (× 3) × N."""
    random = np.random.default_rng(0)
    raw = random.uniform(0.7, 9.9, (HEIGHT, WIDTH, COUNT)).astype(np.float32)
    raw[3, 4:9] = 0
    return {
        "images": random.integers(0, 256, (HEIGHT, WIDTH, 3, COUNT), dtype=np.uint8),
        "depths": random.uniform(0.7, 9.9, (HEIGHT, WIDTH, COUNT)).astype(np.float32),
        "rawDepths": raw,
        "labels": random.integers(0, 895, (HEIGHT, WIDTH, COUNT)).astype(np.uint16),
        "instances": random.integers(0, 3, (HEIGHT, WIDTH, COUNT)).astype(np.uint8),
    }


@pytest.fixture
def mat(tmp_path: Path, content) -> Path:
    path = tmp_path / "nyu_depth_v2_labeled.mat"
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, array in content.items():
            file.create_dataset(name, data=array.transpose(), chunks=True, compression="gzip")
        file.create_dataset("accelData", data=np.zeros((4, COUNT)))
        for field, texts in (("names", NAMES), ("scenes", ["kitchen_0004"] * COUNT)):
            references = []
            for number, text in enumerate(texts):
                codes = np.array([[ord(letter)] for letter in text], np.uint16)
                references.append(file.create_dataset(f"#refs#/{field}{number}", data=codes).ref)
            file.create_dataset(field, data=np.array([references], dtype=h5py.ref_dtype))
    return path


def image(data: FolderDataset, id: str):
    return data[data.ids.index(id)]


def test_pixels_depths_and_labels_arrive_where_they_belong(mat, content, tmp_path):
    assert main(["prepare", "nyudv2", str(mat), str(tmp_path / "out")]) == 0
    train, test = FolderDataset(tmp_path / "out", "train"), FolderDataset(tmp_path / "out", "test")
    assert (test.ids, train.ids) == (["0000", "0001"], ["0002", "0003", "0004"])  # images 1, 2 and 3, 4, 5
    for data, number in ((test, 1), (train, 4)):
        sample = image(data, f"{number:04d}")
        assert torch.equal(sample.image, torch.from_numpy(content["images"][..., number]).permute(2, 0, 1))
        np.testing.assert_allclose(sample.depth[0], content["depths"][..., number], atol=1.01e-4)
        for row, column in ((0, 0), (23, 31), (7, 20)):
            raw = content["labels"][row, column, number]
            expected = 255 if raw == 0 else nyudv2.raw_to_class()[NAMES[raw - 1]]
            assert sample.label[row, column] == expected


def test_raw_depth_keeps_its_holes(mat, content, tmp_path):
    main(["prepare", "nyudv2", str(mat), str(tmp_path / "out"), "--depth", "raw"])
    data = FolderDataset(tmp_path / "out", "test")
    assert data.name == "nyudv2-raw"
    depth = data[0].depth[0]
    assert (depth[3, 4:9] == 0).all()
    np.testing.assert_allclose(depth, content["rawDepths"][..., 0], atol=1.01e-4)


def test_a_size_takes_the_camera_along(mat, content, tmp_path):
    main(["prepare", "nyudv2", str(mat), str(tmp_path / "out"), "--size", "8", "16"])
    data = FolderDataset(tmp_path / "out", "test")
    sample, full = data[0], nyudv2.camera()
    assert data.name == "nyudv2-8x16"
    assert sample.camera.size == (8, 16)
    assert sample.camera.fx == pytest.approx(full.fx * 16 / 640)
    assert sample.camera.cy == pytest.approx((full.cy + 0.5) * 8 / 480 - 0.5)
    np.testing.assert_allclose(sample.depth[0], content["depths"][1::3, 1::2, 0], atol=1.01e-4)  # nearest, not mixed


def test_it_passes_the_check(mat, tmp_path, capsys):
    main(["prepare", "nyudv2", str(mat), str(tmp_path / "out")])
    assert main(["check", str(tmp_path / "out")]) == 0
    assert "nyudv2/train: 3 samples, 0 errors" in capsys.readouterr().out


def test_an_interrupted_run_goes_on_and_only_then_appears(mat, tmp_path, monkeypatch):
    out, read = tmp_path / "out", []
    original = nyudv2._Reader.sample

    def sample(self, index):
        if index == 3 and 3 not in read:
            read.append(index)
            raise KeyboardInterrupt
        read.append(index)
        return original(self, index)

    monkeypatch.setattr(nyudv2._Reader, "sample", sample)
    with pytest.raises(KeyboardInterrupt):
        prepare_nyudv2(mat, out, None, "filled", workers=1)
    assert not out.exists()
    done = {path.stem for path in (tmp_path / "out.partial/labels").glob("*.png")}
    assert {"0000", "0001", "0002"} <= done
    read_before = len(read)
    prepare_nyudv2(mat, out, None, "filled", workers=1)
    assert len(read) - read_before == COUNT - len(done)
    assert len(FolderDataset(out, "train")) == 3
    assert sorted(path.name for path in out.iterdir()) == ["dataset.json", "depth", "images", "labels", "splits"]


def test_other_settings_do_not_continue_a_folder(mat, tmp_path):
    (tmp_path / "out.partial/images").mkdir(parents=True)
    (tmp_path / "out.partial/dataset.json").write_text(json.dumps({"settings": {"depth": "raw"}}))
    with pytest.raises(ValueError, match=r"was begun with other settings, .*settings {'depth': 'raw'} and not"):
        prepare_nyudv2(mat, tmp_path / "out", None, "filled", workers=1)


def test_nothing_is_overwritten(mat, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("precious")
    assert main(["prepare", "nyudv2", str(mat), str(tmp_path / "out")]) == 1
    assert "exists and is left as it is" in capsys.readouterr().err
    assert (tmp_path / "out/mine.txt").read_text() == "precious"


def test_wrong_files_are_named(tmp_path, capsys):
    assert main(["prepare", "nyudv2", str(tmp_path / "x.mat"), str(tmp_path / "out")]) == 1
    assert "x.mat is missing" in capsys.readouterr().err
    (tmp_path / "x.mat").write_text("not HDF5")
    assert main(["prepare", "nyudv2", str(tmp_path / "x.mat"), str(tmp_path / "out")]) == 1
    assert "cannot be read as HDF5" in capsys.readouterr().err
    with h5py.File(tmp_path / "y.mat", "w") as file:
        file.create_dataset("images", data=np.zeros(3))
    assert main(["prepare", "nyudv2", str(tmp_path / "y.mat"), str(tmp_path / "out")]) == 1
    assert "has no labels, names, depths" in capsys.readouterr().err
    assert not (tmp_path / "out.partial").exists()


def replaced(mat: Path, name: str, make) -> None:
    """What ``make(file)`` puts in the place of ``name``."""
    with h5py.File(mat, "r+") as file:
        del file[name]
        make(file)


def typed(name, kind):
    return lambda file: file.create_dataset(name, data=np.ones((COUNT, WIDTH, HEIGHT), kind))


def claimed(*, written=True, **shapes):
    """Arrays of which one number at most is in the file."""

    def make(file):
        for name, shape in shapes.items():
            kind = {"images": np.uint8, "labels": np.uint16, "depths": np.float32}[name]
            if name in file:
                del file[name]
            array = file.create_dataset(name, shape, kind, chunks=(1,) * (len(shape) - 2) + (8, 8))
            if written:
                array[(0,) * len(shape)] = 1

    return make


def external(file):
    with h5py.File(Path(file.filename).with_name("other.h5"), "w") as other:
        other.create_dataset("labels", data=np.ones((COUNT, WIDTH, HEIGHT), np.uint16))
    file["labels"] = h5py.ExternalLink("other.h5", "/labels")


def soft(file):
    file.create_dataset("elsewhere", data=np.ones((COUNT, WIDTH, HEIGHT), np.uint16))
    file["labels"] = h5py.SoftLink("/elsewhere")


def raw_bytes_elsewhere(file):
    other = Path(file.filename).with_name("other.bin")
    other.write_bytes(b"\1\0" * COUNT * WIDTH * HEIGHT)
    file.create_dataset("labels", (COUNT, WIDTH, HEIGHT), np.uint16, external=[(str(other), 0, h5py.h5f.UNLIMITED)])


def virtual(file):
    layout = h5py.VirtualLayout((COUNT, WIDTH, HEIGHT), np.uint16)
    layout[:] = h5py.VirtualSource("other.h5", "labels", (COUNT, WIDTH, HEIGHT))
    file.create_virtual_dataset("labels", layout)


def many_names(file):
    file.create_dataset("names", (1, MANY), h5py.ref_dtype, chunks=(1, 100))[0, 0] = file["images"].ref


def texts(*names):
    def make(file):
        references = [file.create_dataset(f"own/{i}", data=name).ref for i, name in enumerate(names)]
        file.create_dataset("names", data=np.array([references], dtype=h5py.ref_dtype))

    return make


MANY = 10**9


@pytest.mark.parametrize(("name", "make", "message"), [
    ("images", lambda f: f.create_dataset("images", data=np.ones((COUNT, 3, WIDTH, HEIGHT))), "images holds float64"),
    ("images", typed("images", np.uint8), "images has shape"),
    ("images", lambda f: f.create_dataset("images", data=np.ones((0, 3, WIDTH, HEIGHT), np.uint8)), "images has shape"),
    ("labels", typed("labels", np.float32), "labels holds float32"),
    ("labels", lambda f: f.create_dataset("labels", data=np.full((COUNT, WIDTH, HEIGHT), -1)), "labels holds int64"),
    ("depths", typed("depths", np.uint16), "depths holds uint16"),
    ("names", lambda f: f.create_dataset("names", data=np.ones((1, 3))), "names holds float64"),
    ("labels", lambda f: f.create_group("labels"), "labels is a group"),
    ("names", lambda f: f.create_group("names"), "names is a group"),
    ("labels", external, "labels is a link"),
    ("labels", soft, "labels is a link"),
    ("labels", raw_bytes_elsewhere, "labels lies in another file"),
    ("labels", virtual, "labels lies in another file"),
    ("images", claimed(images=(MANY, 3, WIDTH, HEIGHT), labels=(MANY, WIDTH, HEIGHT), depths=(MANY, WIDTH, HEIGHT)),
     f"{MANY} images"),
    ("images", claimed(images=(1, 3, 10**5, 10**5), labels=(1, 10**5, 10**5), depths=(1, 10**5, 10**5)), "640"),
    ("images", claimed(written=False, images=(COUNT, 3, WIDTH, HEIGHT)), "images has no data"),
    ("names", many_names, f"names has {MANY}"),
    ("names", lambda f: f.create_dataset("names", data=["wall", "floor"]), "names holds object"),
    ("names", texts(np.full(10**6, 65, np.uint16)), "names"),
    ("names", texts(np.full(3, 1.5)), "names"),
])  # fmt: skip
def test_a_file_of_another_structure_is_refused_before_anything_is_written(mat, tmp_path, capsys, name, make, message):
    replaced(mat, name, make)
    assert main(["prepare", "nyudv2", str(mat), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert f"{mat}: " in error
    assert message in error
    assert not (tmp_path / "out.partial").exists()


def test_a_wrong_size_is_named(mat, tmp_path, capsys):
    assert main(["prepare", "nyudv2", str(mat), str(tmp_path / "out"), "--size", "0", "3"]) == 1
    assert "size must be (height, width), both at least 1, got (0, 3)" in capsys.readouterr().err
    assert main(["prepare", "nyudv2", str(mat), str(tmp_path / "out"), "--size", "240"]) == 2
    assert "size must be 2 whole numbers or null, got 240" in capsys.readouterr().err


def test_the_standard_split_and_classes():
    splits = nyudv2.splits()
    assert (len(splits["train"]), len(splits["test"])) == (795, 654)
    assert sorted(splits["train"] + splits["test"]) == list(range(1449))
    assert len(nyudv2.classes()) == len(set(default_palette(40))) == 40
    assert len(nyudv2.raw_to_class()) == 894
    known = nyudv2.raw_to_class()
    names = {raw: nyudv2.classes()[known[raw]] for raw in ("book", "books", "refridgerator", "wall", "garbage bin")}
    assert names == {
        "book": "otherprop",  # as the standard mapping has it
        "books": "books",
        "refridgerator": "refrigerator",
        "wall": "wall",
        "garbage bin": "otherfurniture",
    }


def test_parallel_work_keeps_its_order_and_stops_at_an_error():
    assert list(parallel.parallel_map(lambda x: x * x, range(50), workers=4)) == [x * x for x in range(50)]
    begun = []

    def fail(x):
        begun.append(x)
        raise ValueError(x)

    with pytest.raises(ValueError, match="0"):
        list(parallel.parallel_map(fail, range(1000), workers=2))
    assert len(begun) < 10
