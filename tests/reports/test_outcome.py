"""What is read from runs' folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.outcomes import write_outcome
from malleable.reports.outcome import grouped, method_name, read_run, read_training
from malleable.runs.config import Config, ModelConfig, TrainConfig, build_network
from malleable.runs.folder import read_config, write_settings
from malleable.runs.log import ReceptiveField

MALLEABLE = ModelConfig("resnet10t", pretrained=False)


def test_results_go_before_the_last_validation(tmp_path: Path) -> None:
    run = read_run(write_outcome(tmp_path / "x", miou=40.0, validated=30.0, scales=[0.5, 1.0], flip=True))
    assert run.scores is not None
    assert (run.scores.miou, run.scores.pixel_accuracy, run.scores.mean_accuracy) == (40, 60, 50)
    assert run.scores.setting == "synthetic-rooms val, multi-scale 0.5, 1 + flip"
    assert run.scores.source == "results.json"


@pytest.mark.parametrize(("step", "miou"), [(19, 40.0), (20, 11.0), (None, 11.0)])
def test_a_later_validation_goes_before_older_results(tmp_path: Path, step: int | None, miou: float) -> None:
    measured = read_run(write_outcome(tmp_path / "x", miou=11.0, validated=40.0, step=step)).scores
    assert measured is not None
    assert measured.miou == miou


@pytest.mark.parametrize(
    ("other", "counts"),
    [({}, True), ({"split": "test"}, False), ({"scales": [0.5, 1.0]}, False), ({"dataset": "mine"}, False)],
)
def test_faults_measured_on_other_data_or_in_another_way_are_not_the_run_s(
    tmp_path: Path, other: dict[str, Any], counts: bool
) -> None:
    folder = write_outcome(tmp_path / "x", miou=30.0, validated=30.0, stress={"no depth": 7.0}, **other)
    scores = read_training(folder, read_config(folder)).scores
    assert scores is not None
    assert scores.stress == ({"no depth": 7.0} if counts else {})


def test_results_may_be_left_unread(tmp_path: Path) -> None:
    folder = write_outcome(tmp_path / "x", miou=11.0, validated=40.0)
    measured = read_run(folder, evaluated=False).scores
    assert measured is not None
    assert measured.source == "last validation"


def test_without_results_the_last_validation_counts(tmp_path: Path) -> None:
    folder = write_outcome(tmp_path / "x", validated=30.0)
    rows = (folder / "metrics.jsonl").read_text()
    early = json.dumps({"step": 1, "val/miou": 99.0, "val/iou/wall": 99.0})
    (folder / "metrics.jsonl").write_text(f'{early}\n{rows}{{"step": 21, "val/mi')  # killed while writing
    measured = read_run(folder).scores
    assert measured is not None
    assert (measured.miou, measured.iou["wall"], measured.step) == (30, 30, 20)
    assert measured.setting == "synthetic-rooms val, single scale"
    assert measured.source == "last validation"


def test_speed_is_the_median(tmp_path: Path) -> None:
    assert read_run(write_outcome(tmp_path / "x")).images_per_second == 7


@pytest.mark.parametrize(("done", "finished"), [(19, False), (20, True)])
def test_a_run_is_finished_after_its_last_step(tmp_path: Path, done: int, finished: bool) -> None:
    run = read_run(write_outcome(tmp_path / "x", done=done, validated=30.0))
    assert (run.step, run.finished) == (done, finished)


def test_a_run_stopped_before_its_last_validation_is_not_finished(tmp_path: Path) -> None:
    run = read_run(write_outcome(tmp_path / "x", done=20))
    assert (run.step, run.finished) == (20, False)


def test_a_run_without_a_last_validation_is_finished_after_its_last_step(tmp_path: Path) -> None:
    write_outcome(tmp_path)
    settings = tmp_path / "config.yaml"
    settings.write_text(settings.read_text().replace("validate_last: true", "validate_last: false"))
    assert read_run(tmp_path).finished


def test_the_command_goes_on_with_a_run_or_trains_a_finished_one_again(tmp_path: Path) -> None:
    config = f"'{tmp_path}/my run/config.yaml'"
    folder = write_outcome(tmp_path / "my run", done=15)
    assert read_run(folder).command == f"malleable train --config {config} --out '{folder}' --resume auto"
    write_outcome(folder, validated=30.0)
    assert read_run(folder).command == f"malleable train --config {config} --out NEW_FOLDER"


def test_cost_counts_the_parameters_of_the_network(tmp_path: Path) -> None:
    run = read_run(write_outcome(tmp_path / "x", MALLEABLE))
    net = build_network(MALLEABLE, 11)
    assert run.cost is not None
    assert run.cost.parameters == sum(parameter.numel() for parameter in net.parameters())


def test_a_run_whose_data_is_elsewhere_can_be_read(tmp_path: Path) -> None:
    run = read_run(write_outcome(tmp_path / "x", validated=30.0, root="/nowhere/nyudv2"))
    assert run.scores is not None
    assert run.scores.setting == "nyudv2 val, single scale"
    assert isinstance(run.dataset, str)
    assert "/nowhere/nyudv2" in run.dataset
    assert run.cost is None


def test_recovered_depth_is_said(tmp_path: Path) -> None:
    run = read_run(write_outcome(tmp_path / "x", miou=30.0, dataset="nyudv2-half", split="test"))
    assert run.scores is not None
    assert run.scores.setting == "nyudv2-half test (half-size, 8-bit-recovered depth), single scale"


def test_groups_have_names_of_their_own(tmp_path: Path) -> None:
    folders = [
        write_outcome(tmp_path / "short", MALLEABLE, steps=10),
        write_outcome(tmp_path / "long", MALLEABLE, steps=20),
        write_outcome(tmp_path / "flat", ModelConfig("resnet10t", conv="depth_aware", kernels=1, pretrained=False)),
        write_outcome(tmp_path / "hard", ModelConfig("resnet10t", conv="conv25d", kernels=5, pretrained=False)),
    ]
    names = list(grouped(map(read_run, folders)))
    assert names == ["malleable K=3 (short)", "malleable K=3 (long)", "depth-aware", "2.5D K=5"]


def test_methods_that_smooth_depth_are_told_from_those_that_do_not() -> None:
    assert method_name(ModelConfig(smooth_depth=2)) == "malleable K=3, smoothed depth"
    assert method_name(ModelConfig(conv=None, smooth_depth=2)) == "RGB baseline"


def test_a_copy_of_a_run_is_not_another_seed(tmp_path: Path) -> None:
    made = [("a", 0, 40.0), ("b", 1, 42.0), ("copy", 0, 40.0)]
    groups = grouped(read_run(write_outcome(tmp_path / name, miou=miou, seed=seed)) for name, seed, miou in made)
    assert {name: len(group) for name, group in groups.items()} == {"RGB baseline (a)": 2, "RGB baseline (copy)": 1}


def test_seeds_belong_together_whatever_does_not_change_what_they_learn(tmp_path: Path) -> None:
    folders = [write_outcome(tmp_path / str(seed), miou=40.0, seed=seed) for seed in range(2)]
    config = read_config(folders[1])
    write_settings(folders[1], replace(config, data=replace(config.data, workers=7)))
    assert [len(group) for group in grouped(map(read_run, folders)).values()] == [2]


def test_settings_of_another_version_are_named(tmp_path: Path) -> None:
    folder = write_outcome(tmp_path / "x")
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace("steps:", "iterations:"))
    with pytest.raises(ValueError, match=r"x/config\.yaml: .*'iterations'.* use the version that wrote it"):
        read_run(folder)


def test_folders_of_one_name_are_told_apart_by_their_path(tmp_path: Path) -> None:
    folders = [write_outcome(tmp_path / str(steps) / "x", steps=steps) for steps in (10, 20)]
    names = list(grouped(map(read_run, folders)))
    assert names == [f"RGB baseline ({folder})" for folder in folders]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no run \(config.yaml is missing\)"):
        read_run(tmp_path)


@pytest.mark.parametrize("text", ['{"miou": "high"}', "{}", '{"miou": 1, "pixel_accuracy": 1, "mean_accuracy": 1}'])
def test_foreign_results_are_named(tmp_path: Path, text: str) -> None:
    folder = write_outcome(tmp_path / "x")
    (folder / "results.json").write_text(text)
    with pytest.raises(ValueError, match=r"results.json is not what malleable evaluate writes"):
        read_run(folder)


def test_the_log_tells_how_a_run_came_to_its_scores(tmp_path: Path) -> None:
    field = {"center_0": -1.0, "center_1": 0.0, "center_2": 1.0, "temperature": 0.7, "scale_1": 1.0}
    rows = [
        {"step": 10, "loss": 2.0, "images_per_second": 2.0},
        {"step": 10, "val/miou": 30.0, "val/pixel_accuracy": 50.0, "val/mean_accuracy": 40.0},
        {"step": 20, "loss": 1.0, "images_per_second": 4.0}
        | {f"receptive_field/layer1/{name}": value for name, value in field.items()},
        {"step": 20, "val/miou": 35.0, "val/pixel_accuracy": 55.0, "val/mean_accuracy": 45.0, "val/iou/wall": 60.0},
    ]
    path, config = tmp_path / "metrics.jsonl", Config(train=TrainConfig(steps=20))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:-1]))
    assert not read_training(tmp_path, config).finished
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = read_training(tmp_path, config)
    assert found.finished
    assert found.scores is not None
    assert (found.scores.miou, found.scores.pixel_accuracy, found.scores.mean_accuracy) == (35, 55, 45)
    assert (found.scores.iou, found.curve, found.images_per_second) == ({"wall": 60.0}, {10: 30.0, 20: 35.0}, 3.0)
    assert found.receptive_fields == {"layer1": ReceptiveField((-1.0, 0.0, 1.0), 0.7, (1.0,))}


def test_a_network_that_looks_at_numbers_has_no_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "looking.py").write_text(
        "from torch import nn\n"
        "class Looking(nn.Module):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__()\n"
        "        self.conv = nn.Conv2d(3, num_classes, 3, padding=1)\n"
        "    def forward(self, x):\n"
        "        y = self.conv(x)\n"
        "        return y if y.abs().max() < 1e9 else 0 * y\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = ModelConfig(network="looking:Looking", where="all", pretrained=False)
    folder = write_outcome(tmp_path / "x", miou=40.0)
    assert replace(read_run(folder), config=replace(read_config(folder), model=model), trust=True).cost is None
