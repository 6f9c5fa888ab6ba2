"""Estimated depth: tiny networks with random weights saved here, and true depth times an unknown factor a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import malleable as mb
from helpers.toys import MODEL, scenes, write_run
from malleable import cli
from malleable.inference.estimate import DepthEstimator
from malleable.inference.load import Trained

DATA = scenes()
FOCAL = DATA[0].camera.focal


def picture(index: int) -> Image.Image:
    return Image.fromarray(DATA[index].image.permute(1, 2, 0).numpy())


def true_depth(factor: Callable[[int], float]) -> Callable[[Image.Image], Any]:
    """What an estimator would give that is right up to a factor for each picture."""
    depths = {picture(i).tobytes(): factor(i) * DATA[i].depth.as_subclass(Tensor)[0] for i in range(len(DATA))}
    return lambda image: {"predicted_depth": depths[image.tobytes()]}


def save_estimator(folder: Path, metric: bool) -> Path:
    """A Depth Anything of a few channels with random weights, and its image processor."""
    transformers = pytest.importorskip("transformers")
    backbone = transformers.Dinov2Config(
        image_size=28, patch_size=14, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        out_features=["stage1", "stage2"], reshape_hidden_states=False, apply_layernorm=True,
    )  # fmt: skip
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone, reassemble_hidden_size=8, reassemble_factors=[2, 1], neck_hidden_sizes=[4, 4],
        fusion_hidden_size=4, head_hidden_size=4, max_depth=10 if metric else 1,
        depth_estimation_type="metric" if metric else "relative",
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.DepthAnythingForDepthEstimation(config).save_pretrained(folder)
    size = {"height": 28, "width": 28}
    transformers.DPTImageProcessor(size=size, do_resize=True, ensure_multiple_of=14).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def metric(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_estimator(tmp_path_factory.mktemp("estimators") / "metric", metric=True)


@pytest.fixture(scope="module")
def relative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_estimator(tmp_path_factory.mktemp("estimators") / "relative", metric=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "x")


@pytest.fixture(scope="module")
def trained(run: Path) -> Trained:
    return mb.load(run, device="cpu")


def test_true_depth_times_an_unknown_factor_a_picture_gives_the_same_labels(trained: Trained) -> None:
    images = [picture(i) for i in range(3)]
    truth = DepthEstimator(true_depth(lambda i: 1), "metric")
    scaled = DepthEstimator(true_depth(lambda i: 0.07 * 11.0**i), "scale")
    expected, found = (trained.predict(images, focal=FOCAL, estimator=each) for each in (truth, scaled))
    measured = trained.predict(images, [DATA[i].depth.as_subclass(Tensor)[0] for i in range(3)], focal=FOCAL)
    for first, second, third in zip(expected, found, measured, strict=True):
        np.testing.assert_allclose(second.probabilities, first.probabilities, atol=1e-5)
        assert np.array_equal(second.labels, first.labels)
        assert np.array_equal(first.labels, third.labels)
        assert len(np.unique(first.labels)) > 2


def test_a_network_that_takes_metres_refuses_what_is_up_to_a_factor(tmp_path: Path) -> None:
    net = mb.load(write_run(tmp_path / "y", model=replace(MODEL, conv="depth_aware")), device="cpu")
    with pytest.raises(ValueError, match=r"the network takes metres, but .* gives depth up to an unknown factor"):
        net.predict(picture(0), focal=FOCAL, estimator=DepthEstimator(true_depth(lambda i: 2), "scale"))
    net.predict(picture(0), focal=FOCAL, estimator=DepthEstimator(true_depth(lambda i: 1), "metric"))


def test_disparity_between_the_nearest_and_the_farthest_is_depth() -> None:
    depth = DATA[0].depth.as_subclass(Tensor)[0].clone()
    depth[depth == 0] = depth.max()
    near, far = float(depth.min()), float(depth.max())
    estimator = DepthEstimator(lambda image: {"predicted_depth": 5 / depth - 3}, "disparity", (near, far))
    torch.testing.assert_close(estimator(DATA[0].image.as_subclass(Tensor)), depth, rtol=1e-4, atol=0)


def test_a_flat_or_broken_estimate_is_no_trouble() -> None:
    image = DATA[0].image.as_subclass(Tensor)
    flat = DepthEstimator(lambda image: {"predicted_depth": torch.ones(24, 32)}, "disparity", (1, 4))(image)
    assert (flat == 4).all()
    broken = torch.tensor([[float("nan"), float("inf"), -1.0, 2.0]]).repeat(24, 8)
    assert DepthEstimator(lambda image: {"predicted_depth": broken}, "scale")(image)[0, :4].tolist() == [0, 0, 0, 2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_disparity_that_is_no_number_is_unknown_depth_and_spoils_no_other(bad: float) -> None:
    image = DATA[0].image.as_subclass(Tensor)
    disparity = torch.tensor([[bad, 0.0, 3.0, 1.0]]).repeat(24, 8)
    depth = DepthEstimator(lambda image: {"predicted_depth": disparity}, "disparity", (1, 4))(image)
    assert depth[0, :4].tolist() == [0, 4, 1, 2]
    nothing = DepthEstimator(lambda image: {"predicted_depth": torch.full((24, 32), bad)}, "disparity", (1, 4))(image)
    assert not nothing.any()


def test_the_configuration_says_what_the_numbers_are(metric: Path, relative: Path) -> None:
    estimator = DepthEstimator(metric)
    assert str(estimator) == f"{metric}: depth in metres"
    depth = estimator(DATA[0].image.as_subclass(Tensor))
    assert (depth.shape, depth.dtype) == ((24, 32), torch.float32)
    with pytest.raises(ValueError, match="up to an unknown factor and shift, which is no depth: say how far"):
        DepthEstimator(relative)
    depth = DepthEstimator(relative, near_far=(1, 5))(DATA[0].image.as_subclass(Tensor))
    assert ((depth > 0.999) & (depth < 5.001)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "inverse"}, "kind must be None or one of 'metric', 'scale', 'disparity', got 'inverse'"),
        ({}, "does not say what its numbers are; kind must be one of"),
        ({"kind": "disparity", "near_far": (5, 1)}, "near_far must be two positive depths, the nearer first"),
        ({"kind": "disparity", "near_far": (1, 2, 5)}, "near_far must be two positive depths"),
        ({"kind": "disparity", "near_far": 5}, "near_far must be two positive depths"),
        ({"kind": "metric", "near_far": (1, 5)}, "near_far turns disparity into depth, but .* in metres"),
    ],
)
def test_refusals(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DepthEstimator(lambda image: {}, **arguments)


def test_near_and_far_may_be_an_array() -> None:
    assert DepthEstimator(lambda image: {}, "disparity", np.array([1, 5])).near_far == (1.0, 5.0)  # type: ignore[arg-type]


def test_an_answer_without_depth_is_named() -> None:
    estimator = DepthEstimator(lambda image: torch.ones(24, 32), "metric")
    with pytest.raises(TypeError, match=r"must give a dict with predicted_depth, \(H, W\), got Tensor"):
        estimator(DATA[0].image.as_subclass(Tensor))
    estimator = DepthEstimator(lambda image: {"depth": torch.ones(24, 32)}, "metric")
    with pytest.raises(TypeError, match=r"got one with depth$"):
        estimator(DATA[0].image.as_subclass(Tensor))


def test_a_wrong_size_is_named() -> None:
    estimator = DepthEstimator(lambda image: {"predicted_depth": torch.ones(2, 2)}, "metric")
    with pytest.raises(ValueError, match=r"gave depth of \(2, 2\) for an image of \(3, 24, 32\)"):
        estimator(DATA[0].image.as_subclass(Tensor))


def test_a_camera_is_needed_all_the_same(trained: Trained) -> None:
    with pytest.raises(ValueError, match="depth needs a camera"):
        trained.predict(picture(0), estimator=DepthEstimator(true_depth(lambda i: 1), "metric"))


def test_code_in_a_folder_is_never_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "estimator"
    folder.mkdir()
    mark = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\n")
    auto = {"AutoConfig": "own.Config", "AutoModelForDepthEstimation": "own.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
    with pytest.raises(ValueError, match="cannot be used to estimate depth"):
        DepthEstimator(folder)
    assert not mark.exists()


def test_pickled_weights_are_refused(metric: Path, tmp_path: Path) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((metric / name).read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be used to estimate depth"):
        DepthEstimator(tmp_path)


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        DepthEstimator(tmp_path)


class TestCommand:
    @pytest.fixture
    def predict(self, run: Path, tmp_path: Path) -> Callable[..., int]:
        picture(0).save(tmp_path / "photo.png")

        def command(*flags: Any) -> int:
            photo, out = str(tmp_path / "photo.png"), str(tmp_path / "out")
            return cli.main(["predict", str(run), photo, "--out", out, *map(str, flags)])

        return command

    def test_it_labels_a_photograph(
        self, predict: Callable[..., int], metric: Path, trained: Trained, tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        assert predict("--estimate-depth", metric, "--focal", FOCAL) == 0
        said = capsys.readouterr().err
        assert f"note: depth is estimated by {metric}: depth in metres" in said
        assert "has no depth" not in said
        labels = np.array(Image.open(tmp_path / "out/labels/photo.png"))
        assert np.array_equal(labels, trained.predict(picture(0), focal=FOCAL, estimator=str(metric)).labels)

    def test_measured_depth_goes_before_an_estimate(
        self, predict: Callable[..., int], metric: Path, trained: Trained, tmp_path: Path
    ) -> None:
        depth = DATA[0].depth.as_subclass(Tensor)[0].numpy()
        np.save(tmp_path / "photo_depth.npy", depth)
        assert predict("--estimate-depth", metric, "--focal", FOCAL) == 0
        labels = np.array(Image.open(tmp_path / "out/labels/photo.png"))
        assert np.array_equal(labels, trained.predict(picture(0), depth, focal=FOCAL).labels)

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--estimate-depth", "RELATIVE", "--focal", "30"], "which is no depth: say how far"),
            (["--estimate-depth", "RELATIVE"], "has depth but no camera"),
            (["--estimate-range", "1", "5"], "add --estimate-depth MODEL"),
            (["--estimate-depth", "RELATIVE", "--depth", "."], "leave one of them out"),
        ],
    )
    def test_what_cannot_work_is_refused(
        self, predict: Callable[..., int], relative: Path, flags: list[str], message: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        flags = [str(relative) if flag == "RELATIVE" else flag for flag in flags]
        if message == "has depth but no camera":
            flags += ["--estimate-range", "1", "5"]
        assert predict(*flags) == 1
        assert message in capsys.readouterr().err
