"""Labels of networks beside each other, against the network's own probabilities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.toys import MODEL, scenes, write_run
from malleable.data.tv_tensors import IGNORE
from malleable.explorer.explorer import Explorer, Scene, Source
from malleable.explorer.labels import html, label
from malleable.explorer.layer import Layer
from malleable.explorer.scenes import Fault, items_of
from malleable.inference.load import Trained, load_trained
from malleable.inference.probabilities import probabilities

SAMPLE = scenes()[1]


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    folder = tmp_path_factory.mktemp("runs")
    runs = {"ours": MODEL, "rgb": replace(MODEL, conv=None)}
    return {name: load_trained(write_run(folder / name, model=model), "cpu") for name, model in runs.items()}


def labels_of(trained: Trained, sample: object) -> np.ndarray:
    return probabilities(trained.net, sample).argmax(0).numpy()  # type: ignore[arg-type]


def test_each_network_labels_the_scene_and_ours_also_without_depth(networks: dict[str, Trained]) -> None:
    shown = Fault(noise=0.5)(SAMPLE)
    found = {one.title: one for one in label(networks, SAMPLE, shown)}
    assert list(found) == ["the truth", "ours", "ours, no depth", "rgb"]
    np.testing.assert_array_equal(found["ours"].labels, labels_of(networks["ours"], shown))
    np.testing.assert_array_equal(found["ours, no depth"].labels, labels_of(networks["ours"], Fault(unknown=1)(SAMPLE)))
    np.testing.assert_array_equal(found["rgb"].labels, labels_of(networks["rgb"], SAMPLE))
    changed = np.mean(found["ours"].labels != labels_of(networks["ours"], SAMPLE))
    right = np.mean(found["ours"].labels == SAMPLE.label.numpy())  # no pixel of a scene is unlabelled
    assert found["ours"].said == f"{right:.1%} right, {changed:.1%} changed by what is wrong with depth"
    assert "changed" not in found["rgb"].said


def test_without_a_fault_or_a_truth_there_is_less_to_say(networks: dict[str, Trained]) -> None:
    unlabelled = replace(SAMPLE, label=torch.full_like(SAMPLE.label, IGNORE))
    assert [one.said for one in label(networks, unlabelled, unlabelled)] == ["", "", ""]


def test_the_truth_of_other_classes_is_not_shown(networks: dict[str, Trained]) -> None:
    data = scenes()
    sources = {"same": Source(items_of(data), data.classes), "other": Source(items_of(data), ("cat", "dog"))}
    explorer = Explorer(sources, networks, {})
    assert "the truth" in explorer.labelled(explorer.pick("same", 0, Layer()))
    assert "the truth" not in explorer.labelled(explorer.pick("other", 0, Layer()))


def test_without_networks_there_is_nothing_to_show() -> None:
    assert Explorer({}, {}, {}).labelled(Scene.of(SAMPLE, Layer())) == ""


def test_networks_of_other_classes_are_refused(networks: dict[str, Trained]) -> None:
    other = replace(networks["rgb"], classes=("cat", "dog"))
    with pytest.raises(ValueError, match=r"classes differ: ours knows 11, rgb knows 2"):
        Explorer({}, networks | {"rgb": other}, {})


def test_names_are_text_on_the_page(networks: dict[str, Trained]) -> None:
    found = label({"<script>": networks["rgb"]}, SAMPLE, SAMPLE)
    page = html(found, ["<b>" for _ in networks["rgb"].classes], networks["rgb"].palette)
    assert "<script>" not in page
    assert "&lt;b&gt;" in page
