"""Means, spreads and gains, against numbers worked out by hand; what a study keeps of them and shows."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.outcomes import write_outcome
from malleable.commands.study import compared
from malleable.reports.comparison import Comparison, read_results
from malleable.reports.outcome import Run, grouped, read_run
from malleable.reports.plan import Plan, PlannedRun
from malleable.reports.statistics import Average
from malleable.reports.tables import field_cells, print_table, score_cells, split_cells, stress_cells, to_markdown
from malleable.runs.config import Config, DataConfig, ModelConfig, TrainConfig
from malleable.runs.log import ReceptiveField
from malleable.runs.scores import Protocol, Scores

MODELS = {"RGB": ModelConfig(conv=None), "ours": ModelConfig(conv="malleable")}
MIOU = {("RGB", 0): 40.0, ("RGB", 1): 42.0, ("ours", 0): 43.0, ("ours", 1): 49.0}


def run_of(row: str, seed: int) -> PlannedRun:
    config = Config(MODELS[row], DataConfig("data/nyudv2"), TrainConfig(steps=20, seed=seed))
    return PlannedRun(row, seed, config)


def plan() -> Plan:
    return Plan("A title", "", "out", None, ("RGB", "ours"), tuple(run_of(*key) for key in MIOU))


KEPT = Path("kept")


def result(run: PlannedRun, miou: float, kept: Path = KEPT) -> Run:
    data, steps = run.config.data, run.config.train.steps
    scores = Scores(
        miou, miou + 30, miou + 10, {"wall": 50.0}, data.root, data.val, Protocol(), steps, "last validation"
    )
    fields = {"layer1": ReceptiveField((-1.0, 0.0, 1.0), 0.5, (1.0,))}
    return Run(kept, run.config, scores, steps, {20: miou}, fields, 3.0)


def results(kept: Path = KEPT) -> dict[PlannedRun, Run]:
    return {run: result(run, MIOU[run.row, run.seed], kept) for run in plan().runs}


def study(found: dict[PlannedRun, Run] | None = None, planned: Plan | None = None) -> Comparison:
    return compared(planned or plan(), results() if found is None else found, Path("out"))


def test_means_and_sample_deviations_over_seeds() -> None:
    rgb, ours = study().to_dict()["rows"]
    assert rgb["miou"] == {"mean": 41.0, "n": 2, "spread": pytest.approx(2**0.5)}
    assert ours["pixel_accuracy"] == {"mean": 76.0, "n": 2, "spread": pytest.approx(18**0.5)}


def test_gains_are_taken_seed_by_seed() -> None:
    reach = math.tan(0.95 * math.pi / 2)
    assert study().to_dict()["rows"][1]["gain"] == {
        "mean": 5.0,
        "n": 2,
        "spread": pytest.approx(8**0.5),
        "p": pytest.approx(1 - 2 / math.pi * math.atan(2.5)),  # Cauchy's distribution
        "interval": pytest.approx((5 - 2 * reach, 5 + 2 * reach)),
    }
    assert study().to_dict()["rows"][0]["gain"].keys() == {"mean", "spread", "n"}  # the first row beside itself


def test_what_the_last_quarter_added_tells_what_has_levelled_off() -> None:
    curves = {"RGB": {5: 1.0, 14: 2.0, 15: 39.0}, "ours": {10: 2.0}}  # of 20 steps
    found = {run: replace(seen, curve=seen.curve | curves[run.row]) for run, seen in results().items()}
    rgb, ours = study(found).to_dict()["rows"]
    assert rgb["last_quarter"] == {"mean": 2.0, "n": 2, "spread": pytest.approx(2**0.5)}
    assert ours["last_quarter"] is None
    cells = score_cells(study(found))
    assert [line[-1] for line in cells] == ["last quarter", "+2.00 ± 1.41", ""]


def test_a_seed_that_one_row_lacks_does_not_count_for_the_gain() -> None:
    partial = study({run: found for run, found in results().items() if str(run) != "RGB, seed 0"})
    assert partial.rows[1].gain == (7.0, None, 1)
    cells = score_cells(partial)
    assert cells[2][5] == "+7.00 (n = 1)"
    assert "p" not in cells[0]


def test_rows_that_have_no_seed_in_common_yet_are_not_compared() -> None:
    partial = study({run: found for run, found in results().items() if str(run) in ("RGB, seed 0", "ours, seed 1")})
    assert partial.rows[1].gain is None


def test_rows_tested_on_other_data_are_not_compared() -> None:
    runs = [
        replace(run, config=replace(run.config, data=DataConfig("other/nyudv2"))) if run.row == "ours" else run
        for run in plan().runs
    ]
    found = {run: result(run, MIOU[run.row, run.seed]) for run in runs}
    assert study(found, replace(plan(), runs=tuple(runs))).rows[1].gain is None


def test_one_seed_has_no_spread() -> None:
    first = plan().runs[0]
    assert score_cells(study({first: result(first, 40.0)}))[1][:3] == ["RGB", "1", "40.00"]


def test_the_markdown_table_has_the_paper_beside_ours() -> None:
    title, _, *lines = to_markdown(study()).splitlines()
    assert title == "A title"
    assert lines[0].startswith("|  | seeds | mIoU | pixel accuracy | mean accuracy | mIoU above RGB | p | paper's")
    assert lines[3].startswith("| ours | 2 | 46.00 ± 4.24 | 76.00 ± 4.24 | 56.00 ± 4.24 | +5.00 ± 2.83 | 0.242 | 48")


def test_learned_receptive_fields_are_averaged_over_seeds() -> None:
    runs = plan().runs[2:]  # "ours"
    found = {}
    for run, shift in zip(runs, (0.0, 0.2), strict=True):
        field = ReceptiveField((shift - 1, shift, shift + 1), 0.5 + shift, (1.0,))
        found[run] = replace(result(run, 40.0), receptive_fields={"layer1": field})
    heading, line = field_cells(study(found))
    spread = "−0.90 ± 0.14, 0.10 ± 0.14, 1.10 ± 0.14"
    assert line == ["ours", "layer1", spread, "0.60 ± 0.14", "1.00 ± 0.00"]
    assert f"| {' | '.join(line)} |" in to_markdown(study(found))
    assert len(heading) == len(line)


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    name = "ours [bold] :cat: | wide"
    run = replace(run_of("ours", 0), row=name)
    odd = study({run: result(run, 40.0)}, replace(plan(), title="Study [/draft]", rows=(name,), runs=(run,)))
    print_table(odd)
    shown = capsys.readouterr().out
    assert "Study [/draft]" in shown
    assert name in " ".join(shown.split())
    assert "| ours [bold] :cat: &#124; wide |" in to_markdown(odd)


def test_long_names_leave_the_scores_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "malleable K=3, centers and temperature learned"
    runs = tuple(replace(run, row=name) if run.row == "ours" else run for run in plan().runs)
    found = dict(zip(runs, results().values(), strict=True))
    print_table(study(found, replace(plan(), rows=("RGB", name), runs=runs)))
    assert "2 46.00 ± 4.24 76.00 ± 4.24 56.00 ± 4.24 +5.00 ± 2.83 0.242" in " ".join(capsys.readouterr().out.split())


def test_data_that_the_paper_has_not_gets_no_column() -> None:
    run = replace(plan().runs[0], config=Config(MODELS["RGB"], DataConfig("rooms")))
    assert "paper" not in to_markdown(study({run: result(run, 40.0)}, replace(plan(), runs=(run,))))


def test_results_come_back_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(study().to_dict()))
    assert read_results(tmp_path / "results.json", plan()) == results(tmp_path)


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(study().to_dict()))
    changed = [replace(run, config=replace(run.config, train=replace(run.config.train, lr=0.5))) for run in plan().runs]
    with pytest.raises(ValueError, match=r"RGB, seed 0 with other settings: train\.lr was 0\.01 and is 0\.5"):
        read_results(tmp_path / "results.json", replace(plan(), runs=tuple(changed)))


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    older = study().to_dict()
    older["rows"][0]["runs"][0]["settings"]["train"]["iterations"] = 5
    path = tmp_path / "results.json"
    path.write_text(json.dumps(older))
    with pytest.raises(ValueError, match=r"of another version .*'iterations'"):
        read_results(path, plan())
    path.write_text("{}")
    with pytest.raises(ValueError, match="'rows' is missing"):
        read_results(path, plan())


def test_seeds_are_averaged(tmp_path: Path) -> None:
    runs = [read_run(write_outcome(tmp_path / str(s), miou=m, seed=s)) for s, m in enumerate((40.0, 41.0, 45.0))]
    (group,) = Comparison("", grouped(runs)).rows
    assert group.name == "RGB baseline"
    assert group.miou is not None
    assert group.miou == pytest.approx((42.0, 7**0.5, 3))
    wall = group.iou["wall"]
    assert wall is not None
    assert wall.mean == 42


def test_a_single_run_has_no_deviation(tmp_path: Path) -> None:
    (group,) = Comparison("", {"x": [read_run(write_outcome(tmp_path / "x", miou=40.0))]}).rows
    assert group.miou == (40.0, None, 1)


def test_what_was_measured_otherwise_is_not_averaged(tmp_path: Path) -> None:
    write_outcome(tmp_path / "a", miou=10.0, seed=0, done=5)
    write_outcome(tmp_path / "b", miou=40.0, seed=1)
    write_outcome(tmp_path / "c", miou=50.0, seed=2)
    write_outcome(tmp_path / "d", miou=90.0, seed=3, flip=True)
    (group,) = Comparison("", grouped(read_run(tmp_path / name) for name in "abcd")).rows
    assert group.miou is not None
    assert (group.miou.mean, group.miou.n) == (45, 2)


def ahead(other: list[Run], baseline: list[Run]) -> Average | None:
    return Comparison("", {"baseline": baseline, "other": other}, "baseline").rows[1].gain


def test_only_what_was_measured_alike_is_compared(tmp_path: Path) -> None:
    plain, same, other, none = (
        [read_run(write_outcome(tmp_path / name, miou=miou, **setting))]  # type: ignore[arg-type]
        for name, miou, setting in [("a", 40.0, {}), ("b", 43.5, {}), ("c", 50.0, {"split": "test"}), ("d", None, {})]
    )
    assert ahead(same, plain) == (3.5, None, 1)
    assert ahead(other, plain) is None
    assert ahead(none, plain) is None


@pytest.mark.parametrize(("first", "second", "gain"), [
    ((20, 20), (20, 20), 3), ((20, 20), (40, 40), 3), ((10, 20), (10, 20), 3), ((10, 20), (10, 40), 3),
    ((20, 20), (15, 20), None), ((15, 20), (20, 20), None), ((10, 20), (15, 20), None), ((20, 20), (30, 40), None),
])  # fmt: skip
def test_the_end_of_training_or_the_same_step_is_compared(
    tmp_path: Path, first: tuple[int, int], second: tuple[int, int], gain: float | None
) -> None:
    baseline, other = (
        [read_run(write_outcome(tmp_path / name, validated=miou, done=done, steps=steps))]
        for name, miou, (done, steps) in (("a", 10.0, first), ("b", 13.0, second))
    )
    assert ahead(other, baseline) == (None if gain is None else (gain, None, 1))


def with_seeds(folder: Path, scores: dict[int, float]) -> list[Run]:
    return [read_run(write_outcome(folder / str(seed), validated=miou, seed=seed)) for seed, miou in scores.items()]


@pytest.mark.parametrize(("first", "second", "gain"), [
    ({0: 10, 1: 14, 2: 18}, {0: 13}, (3, None, 1)),       # though its mean is lower
    ({0: 10, 1: 14, 2: 18}, {2: 21, 0: 11, 5: 90}, (2, 2**0.5, 2)),
    ({0: 10}, {1: 13}, (3, None, 1)),
    ({0: 10, 1: 14}, {2: 13}, None),
    ({0: 10, 1: 14}, {2: 13, 3: 20}, None),
])  # fmt: skip
def test_runs_of_one_seed_are_compared(
    tmp_path: Path, first: dict[int, float], second: dict[int, float], gain: tuple[float, float | None, int] | None
) -> None:
    baseline, other = with_seeds(tmp_path / "baseline", first), with_seeds(tmp_path / "other", second)
    assert ahead(other, baseline) == (gain and pytest.approx(gain))
    assert ahead(baseline, other) == (gain and pytest.approx((-gain[0], *gain[1:])))


def test_faults_stand_beside_the_scores_of_the_runs_that_were_tested(tmp_path: Path) -> None:
    for seed, miou in enumerate((40.0, 50.0)):
        write_outcome(tmp_path / str(seed), miou=miou, seed=seed)
    write_outcome(tmp_path / "2", miou=60.0, seed=2, stress={"depth × 4": 60.0}, splits={"night": 20.0}, split="val")
    comparison = Comparison("", grouped(read_run(tmp_path / name) for name in "012"))
    assert stress_cells(comparison)[1:] == [["none", "60.00"], ["depth × 4", "60.00"]]
    assert split_cells(comparison)[1:] == [["val", "60.00"], ["night", "20.00"]]


def test_a_split_has_the_name_of_what_was_measured(tmp_path: Path) -> None:
    write_outcome(tmp_path / "run", miou=55.0, split="test", splits={"val": 40.0})
    cells = split_cells(Comparison("", grouped([read_run(tmp_path / "run")])))
    assert cells[1:] == [["test", "55.00"], ["val", "40.00"]]


def test_two_runs_of_one_seed_are_no_row(tmp_path: Path) -> None:
    runs = [read_run(write_outcome(tmp_path / name, miou=40.0)) for name in "ab"]
    with pytest.raises(ValueError, match=r"'x' has two runs of seed 0, .*a and .*b; give each a row of its own"):
        Comparison("", {"x": runs})
