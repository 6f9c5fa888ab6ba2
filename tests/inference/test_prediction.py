"""A trained network in a program: what may be given to it, what comes back, and that it is what predict writes."""

from __future__ import annotations

import dataclasses
import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import malleable as mb
from helpers.toys import MODEL, scenes, write_run
from malleable import cli
from malleable.data import FolderWriter
from malleable.inference.load import Trained
from malleable.runs.checkpoint import read_checkpoint, write_checkpoint
from malleable.runs.scores import Protocol, Scores

DATA = scenes()
SAMPLE = DATA[0]
FOCAL = SAMPLE.camera.focal
IMAGE: np.ndarray = SAMPLE.image.as_subclass(Tensor).permute(1, 2, 0).numpy()  # (24, 32, 3)
DEPTH: np.ndarray = SAMPLE.depth.as_subclass(Tensor)[0].numpy()  # (24, 32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose residual branches are not scaled by 0, as at the start of training: depth has an effect."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "x")
    checkpoint = read_checkpoint(folder)
    model = {name: tensor if tensor.any() else tensor + 1 for name, tensor in checkpoint.model.items()}
    write_checkpoint(folder / "checkpoints", dataclasses.replace(checkpoint, model=model))
    return folder


@pytest.fixture(scope="module")
def trained(run: Path) -> Trained:
    return mb.load(run, device="cpu")


def test_three_lines(trained: Trained) -> None:
    prediction = trained.predict(IMAGE, DEPTH, focal=FOCAL)
    assert (prediction.labels.shape, prediction.labels.dtype) == ((24, 32), np.int64)
    assert (prediction.probabilities.shape, prediction.probabilities.dtype) == ((len(DATA.classes), 24, 32), np.float32)
    np.testing.assert_allclose(prediction.probabilities.sum(0), 1, atol=1e-5)
    assert (prediction.probabilities.argmax(0) == prediction.labels).all()
    overlay = prediction.overlay()
    assert (overlay.size, overlay.mode) == ((32, 24), "RGB")
    colours = np.array(DATA.palette)[prediction.labels]
    assert (np.array(overlay) == (IMAGE.astype(int) + colours) // 2).all()
    assert (trained.classes, trained.palette, trained.scores) == (DATA.classes, DATA.palette, None)


@pytest.mark.parametrize(
    ("image", "depth"),
    [
        (IMAGE.transpose(2, 0, 1), DEPTH[None]),
        (Image.fromarray(IMAGE), Image.fromarray(DEPTH)),
        (torch.from_numpy(IMAGE), torch.from_numpy(DEPTH)),
        (torch.from_numpy(IMAGE).permute(2, 0, 1), torch.from_numpy(DEPTH)[None]),
        (IMAGE[:, ::-1][:, ::-1], DEPTH[..., None].astype(np.float64)),
        (IMAGE.astype(np.float32) / 255, DEPTH),
        (IMAGE, DEPTH.astype(">f4")),
    ],
    ids=["channels first", "PIL", "tensors", "tensors, channels first", "views", "floats", "another byte order"],
)
def test_images_and_depth_of_every_kind(image: Any, depth: Any, trained: Trained) -> None:
    expected = trained.predict(IMAGE, DEPTH, focal=FOCAL)
    found = trained.predict(image, depth, focal=FOCAL)
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-5)
    assert (found.image == IMAGE).all()


def test_it_is_what_the_command_writes(run: Path, trained: Trained, tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "set", "tiny", DATA.classes, DATA.palette)
    writer.write(SAMPLE)
    writer.finish({"val": [SAMPLE.id]})
    flags = ["--scales", "0.75", "1", "--flip", "--window", "16", "24"]
    command = ["predict", str(run), str(tmp_path / "set"), "--split", "val", "--out", str(tmp_path / "out"), *flags]
    assert cli.main(command) == 0
    sample = mb.data.FolderDataset(tmp_path / "set", "val")[0]
    depth = sample.depth.as_subclass(Tensor)
    found = trained.predict(IMAGE, depth, camera=sample.camera, scales=(0.75, 1), flip=True, window=(16, 24))
    for kind, array in (("labels", found.labels), ("colour", found.colour), ("overlay", np.array(found.overlay()))):
        assert (np.array(Image.open(tmp_path / "out" / kind / f"{SAMPLE.id}.png")) == array).all()


def test_cameras_are_given_in_three_ways(trained: Trained) -> None:
    expected = trained.predict(IMAGE, DEPTH, focal=FOCAL).probabilities
    for camera in (SAMPLE.camera, SAMPLE.camera.to_dict()):
        assert np.array_equal(trained.predict(IMAGE, DEPTH, camera=camera).probabilities, expected)
    for focal in (np.array([FOCAL]), [FOCAL], torch.tensor([[FOCAL]], dtype=torch.float64)):
        assert np.array_equal(trained.predict(IMAGE, DEPTH, focal=focal).probabilities, expected)
    wider = trained.predict(IMAGE, DEPTH, focal=3 * FOCAL).probabilities
    assert not np.array_equal(wider, expected)


def test_without_depth_it_says_so_and_sees_colours(trained: Trained) -> None:
    with pytest.warns(UserWarning, match="no depth, so the network sees colours only"):
        found = trained.predict(IMAGE)
    blind = trained.predict(IMAGE, np.zeros_like(DEPTH), focal=FOCAL)
    assert np.array_equal(found.probabilities, blind.probabilities)
    assert not np.array_equal(found.probabilities, trained.predict(IMAGE, DEPTH, focal=FOCAL).probabilities)


@pytest.mark.parametrize("masked", [False, True])
def test_unknown_depth_may_be_nan_or_negative_or_masked(masked: bool, trained: Trained) -> None:
    holes, zeros = DEPTH.copy(), DEPTH.copy()
    holes[:4], holes[4:8], holes[8:9], zeros[:9] = np.nan, -1, np.inf, 0
    if masked:
        holes = np.ma.array(DEPTH, mask=zeros == 0)
    found, expected = (trained.predict(IMAGE, depth, focal=FOCAL).probabilities for depth in (holes, zeros))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("image", "depth", "options", "words"),
    [
        (
            IMAGE,
            (1000 * DEPTH).astype(np.uint16),
            {},
            r"got counts of torch.uint16; malleable.to_metres\(depth, 'mm'\)",
        ),
        (IMAGE, Image.fromarray((1000 * DEPTH).astype(np.uint16)), {}, "to_metres"),
        (IMAGE, DEPTH[::2, ::2], {}, r"the image's size, \(24, 32\) \(height, width\), got \(12, 16\)"),
        (IMAGE, DEPTH, {"focal": None}, "depth needs a camera: pass focal="),
        (IMAGE, DEPTH, {"focal": (20.0, 21.0)}, r"mean of fx and fy, got \(20\.0, 21\.0\); pass camera= for both"),
        (IMAGE, DEPTH, {"camera": SAMPLE.camera.scale(2), "focal": None}, r"its camera is for \(48, 64\)"),
        (IMAGE, DEPTH, {"camera": "cam.json"}, r"camera must be a malleable\.Camera or a dict of .*, got str"),
        (IMAGE, DEPTH, {"focal": "abc"}, "focal must be a number of pixels, got 'abc'"),
        ([IMAGE], Image.fromarray(DEPTH), {}, "depth must be one for each of the 1 images, got one Image"),
        (
            Image.fromarray(IMAGE[..., 0].astype(np.uint16)),
            DEPTH,
            {},
            "8 bits per channel, got a PIL image of mode 'I;16'",
        ),
        (IMAGE[..., 0], DEPTH, {}, r"must be RGB.*got \(24, 32\)"),
        (IMAGE.astype(np.float32), DEPTH, {}, "must lie in 0..1, got 11 to 199; .*as uint8"),
        (IMAGE.astype(np.int64), DEPTH, {}, "must be uint8, or floating-point from 0 to 1, got torch.int64"),
        ([IMAGE, IMAGE], [DEPTH], {}, "depth must be one for each of the 2 images, got 1"),
        ([IMAGE] * 3, [DEPTH] * 3, {"focal": "525"}, "focal must be one for each of the 3 images, got one str"),
        (IMAGE, DEPTH, {"scales": ()}, "scales must be positive"),
        (IMAGE, DEPTH, {"scales": 0.5}, r"scales must be a sequence such as \(0\.75, 1\.0\), got 0\.5"),
        (IMAGE, DEPTH, {"window": 32}, r"window must be a sequence such as \(480, 640\), got 32"),
        ("photo.png", DEPTH, {}, r"image must be an array.*got the path 'photo\.png'; read it first"),
        (IMAGE, Path("depth.png"), {}, r"depth must be an array.*got the path 'depth\.png'; read it first"),
    ],
)
def test_what_cannot_be_labelled_is_named(
    image: Any, depth: Any, options: dict[str, Any], words: str, trained: Trained
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        trained.predict(image, depth, **{"focal": FOCAL, **options})


def test_counts_become_metres_as_the_error_says(trained: Trained) -> None:
    metres = mb.to_metres((1000 * DEPTH).astype(np.uint16), "mm")
    assert metres.dtype == torch.float32
    assert trained.predict(IMAGE, metres, focal=FOCAL).labels.shape == (24, 32)


def test_batches_are_lists_or_have_one_axis_more(trained: Trained) -> None:
    one, other = (trained.predict(*_arrays(index), focal=FOCAL).probabilities for index in (0, 1))
    images, depths = zip(*(_arrays(index) for index in (0, 1)), strict=True)
    for batch in (
        trained.predict(list(images), list(depths), focal=FOCAL),
        trained.predict(np.stack(images), np.stack(depths), focal=[FOCAL, FOCAL]),
        trained.predict(torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(depths))[:, None], focal=FOCAL),
    ):
        assert isinstance(batch, list)
        for found, expected in zip(batch, (one, other), strict=True):
            assert np.array_equal(found.probabilities, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(trained.predict(list(images))) == 2


def _arrays(index: int) -> tuple[np.ndarray, np.ndarray]:
    sample = DATA[index]
    return sample.image.as_subclass(Tensor).permute(1, 2, 0).numpy(), sample.depth.as_subclass(Tensor)[0].numpy()


def test_several_threads_do_not_meet(trained: Trained) -> None:
    """Each has depth of its own; a network that mixed them would give the answers of another."""

    def answer(index: int) -> np.ndarray:
        return trained.predict(*_arrays(index % 4), focal=FOCAL).probabilities

    expected = [answer(index) for index in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for index, found in enumerate(pool.map(answer, range(24))):
            assert np.array_equal(found, expected[index % 4])


SCORES = Scores(50.0, 60.0, 55.0, dict.fromkeys(DATA.classes, 50.0), "rooms", "val", Protocol(), 7)


def test_scores_are_those_of_these_weights(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x")
    (run / "results.json").write_text(json.dumps(SCORES.to_dict()))
    assert mb.load(run).scores == dataclasses.replace(SCORES, confusion=None)
    assert cli.main(["push", str(run), str(tmp_path / "shared")]) == 0
    assert mb.load(tmp_path / "shared").scores == SCORES
    (run / "results.json").write_text(json.dumps({**SCORES.to_dict(), "step": 6}))
    assert mb.load(run).scores is None


def test_the_hub_is_named_wherever_a_network_is(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["push", str(run), str(tmp_path / "hub")]) == 0
    asked: list[str] = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(name)
        return str(tmp_path / "hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("malleable.commands.export.write_torch", lambda net, path: 0.0)  # takes long
    writer = FolderWriter(tmp_path / "set", "tiny", DATA.classes, DATA.palette)
    writer.write(SAMPLE)
    writer.finish({"val": [SAMPLE.id]})
    commands = [
        f"evaluate hf://you/net --dataset {tmp_path}/set --split val",
        f"predict hf://you/net {tmp_path}/set --split val --out {tmp_path}/labels",
        f"figures hf://you/net --data {tmp_path}/set --only assigning_functions --out {tmp_path}/figures",
        f"export hf://you/net {tmp_path}/model.pt2",
    ]
    for command in commands:
        assert cli.main(command.split()) == 0, capsys.readouterr().err
    assert mb.load("hf://you/net").classes == DATA.classes
    assert asked == ["you/net"] * 5


def test_a_scale_free_network_needs_no_unit(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metric = write_run(tmp_path / "metric", model=dataclasses.replace(MODEL, conv="depth_aware"))
    Image.fromarray(IMAGE).save(tmp_path / "a.png")
    Image.fromarray((7 * 5000 * DEPTH).clip(0, 65535).astype(np.uint16)).save(tmp_path / "a_depth.png")
    command = [str(tmp_path / "a.png"), "--focal", str(FOCAL), "--out"]
    assert cli.main(["predict", str(run), *command, str(tmp_path / "free")]) == 0
    assert "depth has no unit, and this network needs none" in capsys.readouterr().err
    assert cli.main(["predict", str(run), *command, str(tmp_path / "said"), "--unit", "0.0001"]) == 0
    assert "unit" not in capsys.readouterr().out
    free, said = (np.array(Image.open(tmp_path / name / "labels/a.png")) for name in ("free", "said"))
    assert (free == said).mean() > 0.99
    assert cli.main(["predict", str(metric), *command, str(tmp_path / "no")]) == 1
    assert "has no unit; add --unit mm" in capsys.readouterr().err
