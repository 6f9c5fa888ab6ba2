"""Means, spreads and gains of a study, against numbers worked out by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from malleable.reports.plan import Plan, PlannedRun
from malleable.reports.tally import Result, Tally, read_results
from malleable.runs.config import Config, DataConfig, ModelConfig, TrainConfig

MODELS = {"RGB": ModelConfig(conv=None), "ours": ModelConfig(conv="malleable")}
MIOU = {("RGB", 0): 40.0, ("RGB", 1): 42.0, ("ours", 0): 43.0, ("ours", 1): 49.0}


def run_of(row: str, seed: int) -> PlannedRun:
    config = Config(MODELS[row], DataConfig("data/nyudv2"), TrainConfig(steps=20, seed=seed))
    return PlannedRun(row, seed, config)


def plan() -> Plan:
    return Plan("A title", "", "out", None, ("RGB", "ours"), tuple(run_of(*key) for key in MIOU))


def result(run: PlannedRun, miou: float) -> Result:
    figures = {"miou": miou, "pixel_accuracy": miou + 30, "mean_accuracy": miou + 10}
    return Result(run.config, figures, {"wall": 50.0}, {20: miou}, {"layer1/temperature": 0.5}, 3.0)


def tally() -> Tally:
    return Tally(plan(), {run: result(run, MIOU[run.row, run.seed]) for run in plan().runs})


def test_means_and_sample_deviations_over_seeds() -> None:
    rgb, ours = tally().to_dict()["rows"]
    assert rgb["miou"] == {"mean": 41.0, "n": 2, "spread": pytest.approx(2**0.5)}
    assert ours["pixel_accuracy"] == {"mean": 76.0, "n": 2, "spread": pytest.approx(18**0.5)}


def test_gains_are_taken_seed_by_seed() -> None:
    assert tally().gains("ours") == [3.0, 7.0]
    assert tally().to_dict()["rows"][1]["gain"] == {
        "mean": 5.0,
        "n": 2,
        "spread": pytest.approx(8**0.5),
        "p": pytest.approx(1 - 2 / math.pi * math.atan(2.5)),  # Cauchy's distribution
    }
    assert "p" not in tally().to_dict()["rows"][0]["gain"]  # the first row beside itself


def test_a_seed_that_one_row_lacks_does_not_count_for_the_gain() -> None:
    partial = Tally(
        plan(), {run: result(run, MIOU[run.row, run.seed]) for run in plan().runs if str(run) != "RGB, seed 0"}
    )
    assert partial.gains("ours") == [7.0]
    assert partial.cells()[2][5] == "+7.00 (n = 1)"
    assert "p" not in partial.cells()[0]


def test_rows_tested_on_other_data_are_not_compared() -> None:
    results = {run: result(run, MIOU[run.row, run.seed]) for run in plan().runs}
    for run in (run for run in plan().runs if run.row == "ours"):
        elsewhere = replace(run.config, data=replace(run.config.data, root="data/streets"))
        results[run] = replace(results[run], config=elsewhere)
    assert Tally(plan(), results).gains("ours") == []


def test_one_seed_has_no_spread() -> None:
    first = plan().runs[0]
    assert Tally(plan(), {first: result(first, 40.0)}).cells()[1][:3] == ["RGB", "1", "40.00"]


def test_the_markdown_table_has_the_paper_beside_ours() -> None:
    title, _, *lines = tally().to_markdown().splitlines()
    assert title == "A title"
    assert lines[0].startswith("|  | seeds | mIoU | pixel accuracy | mean accuracy | mIoU above RGB | p | paper's")
    assert lines[3].startswith("| ours | 2 | 46.00 ± 4.24 | 76.00 ± 4.24 | 56.00 ± 4.24 | +5.00 ± 2.83 | 0.242 | 48")


def test_learned_receptive_fields_are_averaged_over_seeds() -> None:
    runs = plan().runs[2:]  # "ours"
    found = {}
    for run, shift in zip(runs, (0.0, 0.2), strict=True):
        field = {f"layer1/center_{k}": k - 1 + shift for k in range(3)}
        field |= {"layer1/temperature": 0.5 + shift, "layer1/scale_1": 1.0}
        found[run] = replace(result(run, 40.0), receptive_field=field)
    heading, line = Tally(plan(), found).learned()
    spread = "−0.90 ± 0.14, 0.10 ± 0.14, 1.10 ± 0.14"
    assert line == ["ours", "layer1", spread, "0.60 ± 0.14", "1.00 ± 0.00"]
    assert f"| {' | '.join(line)} |" in Tally(plan(), found).to_markdown()
    assert len(heading) == len(line)


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    name = "ours [bold] :cat: | wide"
    run = replace(run_of("ours", 0), row=name)
    odd = Tally(replace(plan(), title="Study [/draft]", rows=(name,), runs=(run,)), {run: result(run, 40.0)})
    odd.print()
    shown = capsys.readouterr().out
    assert "Study [/draft]" in shown
    assert name in " ".join(shown.split())
    assert "| ours [bold] :cat: &#124; wide |" in odd.to_markdown()


def test_long_names_leave_the_figures_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "malleable K=3, centers and temperature learned"
    runs = tuple(replace(run, row=name) if run.row == "ours" else run for run in plan().runs)
    figures = dict(zip(runs, tally().results.values(), strict=True))
    Tally(replace(plan(), rows=("RGB", name), runs=runs), figures).print()
    assert "2 46.00 ± 4.24 76.00 ± 4.24 56.00 ± 4.24 +5.00 ± 2.83 0.242" in " ".join(capsys.readouterr().out.split())


def test_data_that_the_paper_has_not_gets_no_column() -> None:
    run = replace(plan().runs[0], config=Config(MODELS["RGB"], DataConfig("rooms")))
    assert Tally(plan(), {run: result(run, 40.0)}).cells()[0][-1] == "mIoU above RGB"


def test_results_come_back_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(tally().to_dict()))
    assert read_results(tmp_path / "results.json", plan()) == tally().results


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(tally().to_dict()))
    changed = [replace(run, config=replace(run.config, train=replace(run.config.train, lr=0.5))) for run in plan().runs]
    with pytest.raises(ValueError, match=r"RGB, seed 0 with other settings: train\.lr was 0\.01 and is 0\.5"):
        read_results(tmp_path / "results.json", replace(plan(), runs=tuple(changed)))


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    older = tally().to_dict()
    older["rows"][0]["runs"][0]["settings"]["train"]["iterations"] = 5
    path = tmp_path / "results.json"
    path.write_text(json.dumps(older))
    with pytest.raises(ValueError, match=r"of another version .*'iterations'"):
        read_results(path, plan())
    path.write_text("{}")
    with pytest.raises(ValueError, match="'rows' is missing"):
        read_results(path, plan())


def test_a_run_counts_when_it_was_validated_after_its_last_step(tmp_path: Path) -> None:
    rows = [
        {"step": 10, "loss": 2.0, "images_per_second": 2.0},
        {"step": 10, "val/miou": 30.0, "val/pixel_accuracy": 50.0, "val/mean_accuracy": 40.0},
        {"step": 20, "loss": 1.0, "images_per_second": 4.0, "receptive_field/layer1/temperature": 0.7},
        {"step": 20, "val/miou": 35.0, "val/pixel_accuracy": 55.0, "val/mean_accuracy": 45.0, "val/iou/wall": 60.0},
    ]
    path, config = tmp_path / "metrics.jsonl", plan().runs[0].config
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:-1]))
    assert Result.of_run(tmp_path, config) is None
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = Result.of_run(tmp_path, config)
    assert found is not None
    assert found.figures == {"miou": 35.0, "pixel_accuracy": 55.0, "mean_accuracy": 45.0}
    assert (found.iou, found.curve, found.receptive_field) == (
        {"wall": 60.0},
        {10: 30.0, 20: 35.0},
        {"layer1/temperature": 0.7},
    )
    assert found.images_per_second == 3.0
