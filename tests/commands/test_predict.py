"""Prediction as a user calls it: files, folders, splits, and what goes wrong with them."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from helpers.toys import scenes, write_run
from malleable import Camera, cli
from malleable.commands.predict import PredictionWriter, predict_items
from malleable.data import FolderWriter, Sample
from malleable.data.loose import Flags, Item, find_items
from malleable.inference.load import load_trained
from malleable.inference.prediction import label
from malleable.inference.probabilities import probabilities

DATA = scenes()
FOCAL = DATA[0].camera.focal


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "x")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three scenes as a data set, split ``val``; two of them in split ``test``, without labels."""
    writer = FolderWriter(tmp_path / "set", "tiny", DATA.classes, DATA.palette)
    for index in range(3):
        writer.write(DATA[index])
    writer.finish({"val": DATA.ids[:3], "test": DATA.ids[1:3]})
    for id in DATA.ids[1:3]:
        (tmp_path / "set" / "labels" / f"{id}.png").unlink()
    return tmp_path / "set"


@pytest.fixture
def predict(run: Path, tmp_path: Path) -> Callable[..., int]:
    def command(*arguments: str | Path) -> int:
        return cli.main(["predict", str(run), "--out", str(tmp_path / "out"), *map(str, arguments)])

    return command


def pixels(path: Path) -> np.ndarray:
    return np.array(Image.open(path))


def expected(run: Path, sample: Sample) -> np.ndarray:
    return probabilities(load_trained(run).net, sample).argmax(0).numpy()


def test_one_image_with_flags(run: Path, folder: Path, predict: Callable[..., int], tmp_path: Path) -> None:
    """The files are copied away from their data set, so all that is known about them comes from the flags."""
    id = DATA.ids[0]
    image, depth = tmp_path / "photo.png", tmp_path / "z.png"
    image.write_bytes((folder / "images" / f"{id}.png").read_bytes())
    depth.write_bytes((folder / "depth" / f"{id}.png").read_bytes())
    flags = ["--depth", depth, "--unit", "1/5000m", "--focal", FOCAL, "--probabilities"]
    assert predict(image, *flags) == 0
    out = tmp_path / "out"
    labels = pixels(out / "labels" / "photo.png")
    (item,) = find_items([str(image)], None, Flags(depth, "1/5000m", focal=FOCAL))
    sample = item.load()
    assert sample.camera.focal == pytest.approx(FOCAL)
    torch.testing.assert_close(sample.depth.as_subclass(Tensor), DATA[0].depth.as_subclass(Tensor), atol=1e-4, rtol=0)
    assert (labels == expected(run, sample)).all()
    assert len(np.unique(labels)) > 2
    palette = np.array(DATA.palette, np.uint8)
    assert (pixels(out / "colour" / "photo.png") == palette[labels]).all()
    mixed = (pixels(image).astype(int) + palette[labels]) // 2
    assert (pixels(out / "overlay" / "photo.png") == mixed).all()
    with np.load(out / "probabilities" / "photo.npz", allow_pickle=False) as kept:
        assert kept["probabilities"].shape == (len(DATA.classes), 24, 32)
        assert (kept["probabilities"].argmax(0) == labels).mean() > 0.99
        assert kept["classes"].tolist() == list(DATA.classes)


def test_what_is_labelled_is_recorded_too(folder: Path, predict: Callable[..., int], tmp_path: Path) -> None:
    pytest.importorskip("rerun")
    assert predict(folder, "--split", "val", "--rerun", tmp_path / "out.rrd") == 0
    assert (tmp_path / "out.rrd").read_bytes()[:3] == b"RRF"
    assert len(list((tmp_path / "out" / "labels").iterdir())) == 3


def test_the_unit_and_the_focal_length_matter(folder: Path, tmp_path: Path) -> None:
    image, depth = folder / "images" / f"{DATA.ids[0]}.png", folder / "depth" / f"{DATA.ids[0]}.png"
    (tmp_path / "a.png").write_bytes(image.read_bytes())
    (item,) = find_items([str(tmp_path / "a.png")], None, Flags(depth, "0.001", fx=30.0, fy=40.0))
    sample = item.load()
    assert (sample.camera.fx, sample.camera.fy, sample.camera.cx, sample.camera.cy) == (30, 40, 15.5, 11.5)
    torch.testing.assert_close(
        sample.depth.as_subclass(Tensor), 5 * DATA[0].depth.as_subclass(Tensor), atol=1e-3, rtol=0
    )


def test_inside_the_layout_s_folder_depth_and_camera_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "images")
    for name in (f"{DATA.ids[0]}.png", "."):
        assert (find_items([name], None, Flags())[0].load().depth > 0).any()


def test_an_id_with_folders_keeps_its_depth_and_its_name(folder: Path, tmp_path: Path) -> None:
    for kind, suffix in (("images", "png"), ("depth", "png"), ("cameras", "json")):
        (folder / kind / "kitchen").mkdir()
        (folder / kind / f"{DATA.ids[0]}.{suffix}").rename(folder / kind / "kitchen" / f"1.{suffix}")
    for name in ("images/kitchen/1.png", "images/kitchen"):
        (item,) = find_items([str(folder / name)], None, Flags())
        assert Path(item.id) == Path("kitchen/1")
        assert (item.load().depth > 0).any()


def test_a_suffix_in_upper_case_is_found(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.PNG").write_bytes((folder / "images" / f"{DATA.ids[0]}.png").read_bytes())
    (tmp_path / "p_depth.PNG").write_bytes((folder / "depth" / f"{DATA.ids[0]}.png").read_bytes())
    (item,) = find_items([str(tmp_path)], None, Flags(unit="1/5000m", focal=40.0))
    assert (item.load().depth > 0).any()


def test_pairs_may_lie_in_a_folder_called_images(folder: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "images"
    pairs.mkdir()
    (pairs / "x.png").write_bytes((folder / "images" / f"{DATA.ids[0]}.png").read_bytes())
    (pairs / "x_depth.png").write_bytes((folder / "depth" / f"{DATA.ids[0]}.png").read_bytes())
    for name in (pairs, pairs / "x.png"):
        (item,) = find_items([str(name)], None, Flags(unit="1/5000m", focal=40.0))
        assert (item.load().depth > 0).any()


def test_any_name_is_an_image_inside_of_the_layout_s_folder(folder: Path) -> None:
    (folder / "images/x_depth.png").write_bytes((folder / "images" / f"{DATA.ids[0]}.png").read_bytes())
    assert "x_depth" in [item.id for item in find_items([str(folder)], None, Flags())]


def test_an_image_may_have_the_longest_name(folder: Path, predict: Callable[..., int], tmp_path: Path) -> None:
    """Longer ones are looked for beside it, and cannot be there."""
    name = "x" * 251
    (folder / "images" / f"{DATA.ids[0]}.png").rename(tmp_path / f"{name}.png")
    (tmp_path / "cameras").mkdir()
    assert predict(tmp_path / f"{name}.png", "--probabilities") == 0
    assert (tmp_path / "out" / "overlay" / f"{name}.png").is_file()
    assert (tmp_path / "out" / "probabilities" / f"{name}.npz").is_file()


@pytest.mark.parametrize("given", [False, True])
def test_a_camera_file_that_is_wrong_is_named(folder: Path, given: bool) -> None:
    path = folder / "cameras" / f"{DATA.ids[0]}.json"
    path.write_text(json.dumps({**DATA[0].camera.to_dict(), "fx": -1}))
    image = folder / "images" / f"{DATA.ids[0]}.png"
    (item,) = find_items([str(image)], None, Flags(camera=path) if given else Flags())
    with pytest.raises(ValueError, match=rf"cameras/{DATA.ids[0]}\.json: .*'fx'"):
        item.load()


KNOWN = Camera(10.0, 11.0, 4.0, 3.0, (24, 32))


@pytest.mark.parametrize(("flags", "size", "camera"), [
    (Flags(fx=20.0), (24, 32), Camera(20.0, 11.0, 4.0, 3.0, (24, 32))),
    (Flags(focal=20.0), (24, 32), Camera(20.0, 20.0, 4.0, 3.0, (24, 32))),
    (Flags(focal=20.0, fy=21.0), (24, 32), Camera(20.0, 21.0, 4.0, 3.0, (24, 32))),
    (Flags(focal=20.0), (48, 64), Camera(20.0, 20.0, 31.5, 23.5, (48, 64))),
])  # fmt: skip
def test_flags_go_before_the_known_camera(flags: Flags, size: tuple[int, int], camera: Camera) -> None:
    assert flags.camera_of(size, KNOWN) == camera


def test_one_focal_length_serves_both_directions_if_no_camera_is_known() -> None:
    assert Flags(fy=20.0).camera_of((24, 32), None) == Camera(20.0, 20.0, 15.5, 11.5, (24, 32))


def test_a_focal_length_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="fx"):
        Flags(focal=0.0).camera_of((24, 32), KNOWN)


def test_a_camera_of_another_size_is_refused_without_a_focal_length() -> None:
    with pytest.raises(ValueError, match=r"its camera is for \(24, 32\), the image is \(48, 64\)"):
        Flags(fx=20.0).camera_of((48, 64), KNOWN)


def test_names_with_emoji_are_found(folder: Path, predict: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "😀.png").write_bytes((folder / "images" / f"{DATA.ids[0]}.png").read_bytes())
    assert predict(tmp_path / "😀.png") == 0
    assert (tmp_path / "out/labels/😀.png").exists()


def test_a_camera_file(folder: Path, tmp_path: Path) -> None:
    camera = tmp_path / "camera.json"
    camera.write_text(json.dumps({"width": 32, "height": 24, "fx": 31, "fy": 33, "cx": 15, "cy": 11}))
    items = find_items([str(folder)], None, Flags(camera=camera))
    assert items[0].load().camera == Camera(31, 33, 15, 11, (24, 32))


def test_a_folder_in_the_layout(run: Path, folder: Path, predict: Callable[..., int], tmp_path: Path) -> None:
    assert predict(folder) == 0
    for index in range(3):
        (item,) = find_items([str(folder / "images" / f"{DATA.ids[index]}.png")], None, Flags())  # finds dataset.json
        assert (pixels(tmp_path / "out" / "labels" / f"{DATA.ids[index]}.png") == expected(run, item.load())).all()


def test_a_folder_of_pairs(folder: Path, predict: Callable[..., int], tmp_path: Path) -> None:
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    for id in DATA.ids[:2]:
        (pairs / f"{id}.png").write_bytes((folder / "images" / f"{id}.png").read_bytes())
        (pairs / f"{id}_depth.png").write_bytes((folder / "depth" / f"{id}.png").read_bytes())
    assert predict(pairs, "--unit", "1/5000m", "--focal", "40") == 0
    assert sorted(path.stem for path in (tmp_path / "out" / "labels").iterdir()) == DATA.ids[:2]
    items = find_items([str(pairs)], None, Flags(unit="1/5000m", focal=40.0))
    assert all((item.load().depth > 0).any() for item in items)


def test_a_split_needs_no_labels(folder: Path, predict: Callable[..., int], tmp_path: Path) -> None:
    assert predict(folder, "--split", "test") == 0
    assert sorted(path.stem for path in (tmp_path / "out" / "overlay").iterdir()) == DATA.ids[1:3]


def test_several_inputs(folder: Path, predict: Callable[..., int], tmp_path: Path) -> None:
    images = sorted((folder / "images").iterdir())
    assert predict(*images[:2]) == 0
    assert len(list((tmp_path / "out" / "labels").iterdir())) == 2


def test_without_depth_it_warns_and_goes_on(
    folder: Path, predict: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "photo.png"
    image.write_bytes((folder / "images" / f"{DATA.ids[0]}.png").read_bytes())
    assert predict(image) == 0
    assert "warning: photo has no depth" in capsys.readouterr().err
    assert (tmp_path / "out" / "labels" / "photo.png").exists()


def bomb(path: Path) -> None:
    """A PNG that says it is 60000 × 60000."""
    Image.new("L", (1, 1)).save(path)
    data = bytearray(path.read_bytes())
    data[16:24] = (60000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "cannot be read as an image"),
        (lambda path: path.write_bytes(b""), "cannot be read as an image"),
        (bomb, "too large to be read safely"),
    ],
    ids=["cut", "empty", "bomb"],
)
def test_a_bad_file_is_reported_and_skipped(
    spoil: Callable[[Path], None],
    words: str,
    folder: Path,
    predict: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(folder / "images" / f"{DATA.ids[1]}.png")
    assert predict(folder) == 1
    printed = capsys.readouterr()
    assert f"error: {DATA.ids[1]}" in printed.err
    assert words in printed.err
    assert "2 of 3 images" in printed.out
    assert sorted(path.stem for path in (tmp_path / "out" / "labels").iterdir()) == [DATA.ids[0], DATA.ids[2]]


def test_nothing_is_overwritten_silently(
    folder: Path, predict: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "out" / "colour" / f"{DATA.ids[2]}.png"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    assert predict(folder) == 1
    assert "1 files exist" in capsys.readouterr().err
    assert list((tmp_path / "out").rglob("*.*")) == [mine]
    assert predict(folder, "--overwrite") == 0
    assert mine.read_bytes() != b"mine"


def test_interrupted_it_goes_on(
    folder: Path, predict: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One image is done, one has a file cut short and half a file of a killed process, one has nothing yet."""
    out = tmp_path / "out"
    assert predict(folder, "--probabilities") == 0
    wanted = {path: path.read_bytes() for path in out.rglob("*.*")}
    done, cut, absent = DATA.ids[:3]
    for path in wanted:
        if path.stem == absent:
            path.unlink()
    broken = out / "probabilities" / f"{cut}.npz"
    broken.write_bytes(broken.read_bytes()[:-30])
    part = out / "labels" / f"{absent}.{'0' * 32}.part.png"
    part.write_bytes(b"half")
    before = (out / "labels" / f"{done}.png").stat().st_mtime_ns
    capsys.readouterr()
    assert predict(folder, "--probabilities") == 1
    assert "--resume" in capsys.readouterr().err
    assert predict(folder, "--probabilities", "--resume") == 0
    printed = capsys.readouterr().out
    assert "3 of 3 images are labelled" in printed
    assert "1 of them before" in printed
    assert (out / "labels" / f"{done}.png").stat().st_mtime_ns == before
    assert sorted(out.rglob("*.*")) == sorted(wanted)
    assert all(path.read_bytes() == wanted[path] for path in wanted if path.suffix == ".png")
    with np.load(broken, allow_pickle=False) as kept:
        assert kept["probabilities"].shape == (len(DATA.classes), 24, 32)


def test_going_on_leaves_what_others_are_writing(folder: Path, predict: Callable[..., int], tmp_path: Path) -> None:
    other = tmp_path / "out/labels" / f"other.{'0' * 32}.part.png"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"half")
    assert predict(folder, "--resume") == 0
    assert other.exists()


@pytest.mark.parametrize("kind", ["labels", "colour", "overlay"])
def test_a_picture_cut_short_is_made_again(
    kind: str, folder: Path, predict: Callable[..., int], tmp_path: Path
) -> None:
    assert predict(folder) == 0
    path = tmp_path / "out" / kind / f"{DATA.ids[1]}.png"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert predict(folder, "--resume") == 0
    assert path.read_bytes() == whole


def test_going_on_writes_what_is_missing_and_nothing_else(
    run: Path, folder: Path, predict: Callable[..., int], tmp_path: Path
) -> None:
    """Labels corrected by hand, with pictures deleted and a kind of file added since."""
    out, id = tmp_path / "out", DATA.ids[0]
    assert predict(folder) == 0
    labels, overlay = out / "labels" / f"{id}.png", out / "overlay" / f"{id}.png"
    corrected, drawn = np.full((24, 32), 3, np.uint8), overlay.read_bytes()
    Image.fromarray(corrected).save(labels)
    overlay.unlink()
    assert predict(folder, "--resume", "--probabilities") == 0
    assert (pixels(labels) == corrected).all()
    assert overlay.read_bytes() == drawn
    assert (out / "probabilities" / f"{id}.npz").exists()

    truth = (folder / "labels" / f"{id}.png").read_bytes()
    assert cli.main(["predict", str(run), str(folder), "--out", str(folder), "--resume"]) == 0
    assert (folder / "labels" / f"{id}.png").read_bytes() == truth
    assert (folder / "colour" / f"{id}.png").exists()


def test_what_stops_it_says_how_to_go_on(
    folder: Path, predict: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("malleable.commands.predict.predict_items", stop)
    assert predict(folder) == 130
    assert "--resume" in capsys.readouterr().err


def loose(folder: Path, tmp_path: Path) -> Path:
    """An image away from its data set."""
    image = tmp_path / "photo.png"
    image.write_bytes((folder / "images" / f"{DATA.ids[0]}.png").read_bytes())
    return image


@pytest.mark.parametrize("shape", [(24, 32), (1, 24, 32)])
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
def test_depth_in_metres_as_numpy_writes_it(
    shape: tuple[int, ...], kind: type[np.floating], folder: Path, tmp_path: Path
) -> None:
    metres = DATA[0].depth.as_subclass(Tensor).numpy().astype(kind)
    metres[0, 0, :3] = np.nan, np.inf, -1
    image, depth = loose(folder, tmp_path), tmp_path / "photo_depth.npy"
    np.save(depth, metres.reshape(shape))
    loud = tmp_path / "Z.NPY"
    loud.write_bytes(depth.read_bytes())
    for flags in (
        Flags(focal=FOCAL),
        Flags(loud, focal=FOCAL),
        Flags(depth, focal=FOCAL),
        Flags(depth, "m", focal=FOCAL),
    ):
        (item,) = find_items([str(image)], None, flags)
        sample = item.load()
        expected = np.nan_to_num(metres.astype(np.float32), nan=0, posinf=0, neginf=0).clip(0)
        assert sample.depth.dtype == torch.float32
        assert np.array_equal(sample.depth.numpy(), expected)


def test_numpy_s_depth_in_the_layout_s_folder(folder: Path) -> None:
    """Its unit is metres, whatever dataset.json says of counts."""
    depth = folder / "depth" / f"{DATA.ids[0]}.png"
    depth.unlink()
    np.save(depth.with_suffix(".npy"), DATA[0].depth.as_subclass(Tensor).numpy())
    sample = find_items([str(folder)], None, Flags())[0].load()
    assert torch.equal(sample.depth.as_subclass(Tensor), DATA[0].depth.as_subclass(Tensor))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.ones((24, 32), np.uint16), "holds uint16, but depth in .npy is floating point, in metres; .*16-bit"),
        (np.ones((24, 31), np.float32), "24×31 .* but its image is 24×32"),
        (np.ones((24, 32, 1), np.float32), r"shape \(24, 32, 1\), not \(H, W\) or \(1, H, W\)"),
        (np.full((24, 32), 2500.0), "looks like a wrong unit"),
        (np.array([{}]), "cannot be read as an array"),
    ],
    ids=["counts", "size", "shape", "unit", "pickle"],
)
def test_other_arrays_are_refused(array: np.ndarray, words: str, folder: Path, tmp_path: Path) -> None:
    image = loose(folder, tmp_path)
    np.save(tmp_path / "photo_depth.npy", array)
    with pytest.raises(ValueError, match=words):
        find_items([str(image)], None, Flags(focal=FOCAL))[0].load()


@pytest.mark.parametrize("name", ["depth/x.jpg", "depth/x.jpeg"])
def test_depth_as_jpeg_is_called_so(name: str, folder: Path) -> None:
    png = folder / "depth" / f"{DATA.ids[0]}.png"
    png.unlink()
    Image.new("L", (32, 24), 9).save(png.with_suffix(Path(name).suffix))
    with pytest.raises(ValueError, match=r"\.jpe?g is a JPEG image: 8 bits, and lossy.* 16-bit grey PNG"):
        find_items([str(folder)], None, Flags())[0].load()


def test_depth_as_jpeg_beside_an_image_is_called_so(folder: Path, tmp_path: Path) -> None:
    image = loose(folder, tmp_path)
    Image.new("L", (32, 24), 9).save(tmp_path / "photo_depth.jpg")
    (item,) = find_items([str(tmp_path)], None, Flags(unit="mm", focal=FOCAL))
    assert item.id == image.stem
    with pytest.raises(ValueError, match="is a JPEG image"):
        item.load()


def test_depth_of_8_bits_and_of_other_formats_is_called_so(folder: Path, tmp_path: Path) -> None:
    image = loose(folder, tmp_path)
    Image.new("L", (32, 24), 9).save(tmp_path / "d.png")
    (tmp_path / "d.tiff").write_bytes(b"II*")
    for name, words in (("d.png", "8-bit image"), ("d.tiff", r"d.tiff .* 16-bit grey PNG .* \.npy")):
        with pytest.raises(ValueError, match=words):
            find_items([str(image)], None, Flags(tmp_path / name, "mm", focal=FOCAL))[0].load()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--resume", "--overwrite"], "resume keeps what is written"),
        (["--unit", "inch"], "unit must be metres per count or one of m, mm, 0.1mm, 1/5000m, got 'inch'"),
        (["--unit", "-1"], "unit must be"),
        (["--depth", "nowhere"], "depth: there is no nowhere"),
        (["--split", "val", "--unit", "mm"], "says its depth and camera itself, got unit too"),
        (["--split", "val", "--estimate-depth", "x"], "says its depth and camera itself, got estimated too"),
        (["--split", "no"], "the splits of"),
    ],
)
def test_flags_that_make_no_sense(
    flags: list[str], words: str, folder: Path, predict: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(folder, *flags) == 1
    assert words in capsys.readouterr().err


def test_missing_unit_and_camera_are_asked_for(folder: Path) -> None:
    (folder / "dataset.json").unlink()
    for camera in (folder / "cameras").iterdir():
        camera.unlink()
    for flags, words in ((Flags(unit="mm"), "add --focal"), (Flags(focal=30.0), "add --unit mm")):
        with pytest.raises(ValueError, match=words):
            find_items([str(folder)], None, flags)[0].load()


def test_equal_names_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="names twice"):
        find_items([str(folder), str(folder)], None, Flags())


class Colours(nn.Module):
    """Takes two of the colours for logits."""

    def forward(self, image: Tensor, depth: Tensor, focal: Tensor) -> Tensor:
        return image[:, :2]


def peak(items: int, out: Path) -> int:
    """The most memory, in bytes, that labelling so many images of 48 kB took."""

    def load(index: int) -> Sample:
        label = torch.zeros(64, 64, dtype=torch.int64)
        sample = torch.from_numpy(np.zeros((3, 64, 64), np.uint8))
        return Sample(sample, torch.from_numpy(np.ones((1, 64, 64), np.float32)), label, camera, str(index))

    camera, net = Camera(60.0, 60.0, 31.5, 31.5, (64, 64)), Colours()
    writer = PredictionWriter(out, ["a", "b"])
    kept: list[Item] = [Item(str(index), lambda index=index: load(index)) for index in range(items)]  # type: ignore[misc]
    tracemalloc.start()
    predict_items(kept, lambda sample: label(net, sample, [(1, 2, 3), (4, 5, 6)]), writer, workers=2)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def test_many_images_need_no_more_memory_than_few(tmp_path: Path) -> None:
    """Each image holds 28 kB that tracemalloc sees; 400 kept would be 10 MB more than 20.

    In a process of its own: tracemalloc also sees what the threads of other tests do.
    """
    script = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import commands.test_predict as t\n"
        "out = pathlib.Path(sys.argv[2]); t.peak(20, out / 'warm')\n"
        "print(t.peak(400, out / 'many'), t.peak(20, out / 'few'))"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parents[1]), str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    many, few = map(int, finished.stdout.split())
    assert many < few + 400_000
