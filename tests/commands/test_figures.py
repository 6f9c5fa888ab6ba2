"""The figures of runs: which there are, and the files of ``malleable figures``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from helpers.toys import MODEL, scenes, write_run
from malleable import cli
from malleable.data import FolderWriter, SyntheticScenes
from malleable.figures.run import NAMES, Missing, Portrait, comparison_figures, run_figures
from malleable.inference.load import load_trained
from malleable.inference.share import share
from malleable.runs.config import ModelConfig

DATA = scenes(3)
THREE = replace(MODEL, kernels=3, stages=(2, 3))


def with_metrics(run: Path) -> Path:
    rows = [{"step": step, "loss": 3 / step, "lr": 0.1, "val/miou": step} for step in (1, 2)]
    numbers = {f"center_{k}": k - 2 for k in range(5)} | {"temperature": 1} | {f"scale_{k}": 0.3 for k in (1, 2, 3)}
    field = {f"receptive_field/layer1.0.conv1/{name}": value for name, value in numbers.items()}
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | field) + "\n" for row in rows))
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind, on the first three scenes as a folder."""
    root = tmp_path_factory.mktemp("runs")
    writer = FolderWriter(root / "data", "tiny", DATA.classes, DATA.palette)
    for index in range(3):
        writer.write(DATA[index])
    writer.finish({"val": DATA.ids})
    kinds: dict[str, ModelConfig] = {
        "malleable": THREE,
        "single": MODEL,
        "cells": replace(THREE, conv="conv25d"),
        "fading": replace(THREE, conv="depth_aware"),
        "rgb": replace(THREE, conv=None),
    }
    found = {name: write_run(root / name, root=root / "data", model=model) for name, model in kinds.items()}
    with_metrics(found["malleable"])
    return {**found, "data": root / "data"}


def shown(figure: Figure) -> str:
    figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in (axes.get_title(), axes.get_xlabel(), axes.get_ylabel())]
    suptitle = figure.get_suptitle()
    return "\n".join([suptitle, *texts])


def test_a_malleable_run_has_every_figure(runs: dict[str, Path]) -> None:
    found = run_figures(runs["malleable"], baseline=runs["rgb"])
    assert tuple(found) == NAMES
    assert all(isinstance(figure, Figure) for figure in found.values())
    assert [axes.get_title() for axes in found["qualitative"].axes if axes.get_title()] == [
        "image", "depth", "ground truth", "baseline", "malleable", "errors",
    ]  # fmt: skip
    assert "3 of 3 images of tiny" in shown(found["rebalancing"])
    assert [axes.get_ylabel() for axes in found["receptive_fields"].axes if axes.get_ylabel()] == [
        "depth-aware", "2.5D", "malleable",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("single", {"rebalancing", "training", "receptive_field_path"}),
        ("cells", {"assigning_functions", "rebalancing", "training", "receptive_field_path"}),
        ("fading", {"assigning_functions", "rebalancing", "training", "receptive_field_path"}),
        ("rgb", set(NAMES) - {"qualitative", "network"}),
    ],
)
def test_figures_a_run_cannot_have_are_not_there(runs: dict[str, Path], kind: str, missing: set[str]) -> None:
    assert set(run_figures(runs[kind])) == set(NAMES) - missing


def test_a_run_without_checkpoints_has_its_curves(tmp_path: Path) -> None:
    assert list(run_figures(with_metrics(tmp_path / "x"), baseline=tmp_path)) == ["training", "receptive_field_path"]
    assert run_figures(tmp_path / "nothing") == {}


def test_a_run_whose_data_is_gone_has_the_figures_that_need_none(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", root=tmp_path / "gone", model=THREE)
    assert list(run_figures(run)) == ["assigning_functions", "network"]
    assert "qualitative" in run_figures(run, DATA)


def test_networks_of_other_classes_are_not_compared(runs: dict[str, Path], tmp_path: Path) -> None:
    data = scenes(3)
    data.classes, data.palette = data.classes[:-1], data.palette[:-1]
    with pytest.raises(Missing, match="'malleable' knows"):
        Portrait(runs["malleable"], data).qualitative()


def test_runs_beside_each_other(runs: dict[str, Path], tmp_path: Path) -> None:
    chosen = {
        "RGB": runs["rgb"],
        "cells": runs["cells"],
        "ours": runs["malleable"],
        "old": with_metrics(tmp_path / "x"),
    }
    found = comparison_figures(chosen)
    assert list(found) == ["training", "receptive_fields", "qualitative"]
    assert [text.get_text() for text in found["training"].legends[0].get_texts()] == ["ours", "old"]
    assert [axes.get_ylabel() for axes in found["receptive_fields"].axes if axes.get_ylabel()] == ["cells", "ours"]
    titles = [axes.get_title() for axes in found["qualitative"].axes if axes.get_title()]
    assert titles == ["image", "depth", "ground truth", "RGB", "cells", "ours", "errors"]
    assert list(comparison_figures({"RGB": runs["rgb"]})) == ["qualitative"]


def test_receptive_fields_are_drawn_where_the_paper_draws_them(runs: dict[str, Path]) -> None:
    indoors = Portrait(runs["malleable"])
    assert indoors.place == (1.0, pytest.approx(indoors.samples[0].camera.focal))
    outdoors = Portrait(runs["malleable"], SyntheticScenes("streets", size=(24, 32), length=1))
    assert outdoors.place[0] == 20.0
    assert Portrait(runs["malleable"], depth=3.0, focal=500.0).place == (3.0, 500.0)


def test_the_network_is_drawn_as_it_is(runs: dict[str, Path]) -> None:
    merged = Portrait(runs["malleable"])
    texts = " ".join(text.get_text() for text in merged.network().axes[0].texts)
    for part in ("layer1.0.conv1", "reads 1/4", "malleable, K = 3", "1, 6, 12, 18", "skip from res2", "11 classes"):
        assert part in texts
    assert "layer3.0.conv1" not in texts  # res4 was not replaced


def figures(*arguments: object) -> int:
    return cli.main(["figures", *map(str, arguments)])


def test_files_are_written_in_both_formats(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "new" / "figures"
    assert figures(runs["malleable"] / "checkpoints", "--out", out, "--only", "network", "training") == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "network.png", "network.svg", "training.png", "training.svg",
    ]  # fmt: skip
    first = (out / "network.svg").read_bytes()
    assert figures(runs["malleable"], "--out", out, "--only", "network", "--formats", "svg", "--overwrite") == 0
    assert (out / "network.svg").read_bytes() == first


def test_all_figures_that_can_be_drawn_are_and_the_others_are_named(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", runs["data"], "--samples", 1, 0, "--layer", "layer2.0.conv1", "--pixel", 9, 8, "--count", 2]
    assert figures(runs["single"], "--out", tmp_path, *options, "--formats", "png") == 0
    written = {path.stem for path in tmp_path.iterdir()}
    assert written == set(NAMES) - {"rebalancing", "training", "receptive_field_path"}
    out, error = capsys.readouterr()
    assert "6 figures" in out
    assert "rebalancing is left out: a single kernel" in error


def test_a_shared_network_is_drawn_too(runs: dict[str, Path], tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    share(load_trained(runs["malleable"]), shared)
    assert figures(shared, "--out", tmp_path, "--only", "assigning_functions", "network", "--formats", "svg") == 0
    options = ["--data", runs["data"], "--only", "qualitative", "rebalancing", "--formats", "png"]
    assert figures(shared, "--out", tmp_path, *options) == 0
    assert (tmp_path / "rebalancing.png").exists()


def test_nothing_is_overwritten_silently(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "network.svg").write_text("mine")
    assert figures(runs["rgb"], "--out", tmp_path, "--only", "network") == 1
    assert "network.svg exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["network.svg"]
    assert (tmp_path / "network.svg").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "pie"], "only must be among assigning_functions, .* got 'pie'"),
        (["--only", "rebalancing"], "rebalancing cannot be drawn: a single kernel"),
        (["--formats", "gif"], "formats must be among png, svg, got 'gif'"),
        (["--layer", "res5"], r"layer must be one of res3 \(layer2.0.conv1\), got 'res5'"),
        (["--pixel", "32", "0"], "pixel must lie in the image of 32 × 24 pixels, got 32 0"),
        (["--samples", "3"], "samples must be in 0..2 for tiny, got 3"),
        (["--depth", "-1"], "depth must be positive, got -1"),
        (["--count", "0"], "count must be at least 1, got 0"),
        (["--split", "train"], "train"),
        (["--baseline", "nowhere"], "nowhere is neither a checkpoint nor a folder"),
    ],
)
def test_errors_name_the_argument(
    arguments: list[str], message: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figures(runs["single"], "--out", tmp_path / "out", *arguments) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not list(tmp_path.rglob("*.*"))


def test_a_checkpoint_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures(tmp_path / "x", "--out", tmp_path / "out") == 1
    assert "neither a checkpoint nor a folder" in capsys.readouterr().err


def test_matplotlib_is_loaded_only_to_draw_and_without_its_global_state() -> None:
    modules = [f"malleable.commands.{verb}" for verb in cli.COMMANDS if verb not in ("report", "study")]
    code = (
        f"import sys, {', '.join(modules)}; assert 'matplotlib' not in sys.modules; "
        "import malleable.figures.run; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
