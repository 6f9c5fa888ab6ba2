"""What a study's file turns into."""

import shlex
from pathlib import Path

import pytest

from malleable.reports.plan import part, read_plan, slug
from malleable.runs.settings import UsageError

ROOT = Path(__file__).parents[2]

FILE = """
title: Two methods
out: runs/two
seeds: [3, 4]
settings:
  model: {backbone: resnet18, pretrained: false}
  train: {steps: 10, lr: 1e-3}
rows:
  extra: {model: {kernels: 5}, seeds: [7]}
  RGB: {model: {conv: null}}
  "malleable K=3": {train: {lr: 0.5}}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(text)
    return path


def test_every_row_meets_every_seed_and_rows_with_fewer_seeds_come_last(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path, FILE))
    assert plan.rows == ("extra", "RGB", "malleable K=3")
    assert [(run.row, run.seed, run.config.train.seed) for run in plan.runs] == [
        ("RGB", 3, 3), ("malleable K=3", 3, 3), ("RGB", 4, 4), ("malleable K=3", 4, 4), ("extra", 7, 7)
    ]  # fmt: skip


def test_a_row_changes_only_what_it_names(tmp_path: Path) -> None:
    rgb, malleable = read_plan(write(tmp_path, FILE)).runs[:2]
    assert (rgb.config.model.conv, rgb.config.train.lr, rgb.config.model.backbone) == (None, 1e-3, "resnet18")
    assert (malleable.config.model.conv, malleable.config.train.lr, malleable.config.train.steps) == (
        "malleable",
        0.5,
        10,
    )


def test_a_study_needs_the_last_validation(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train\.validate_last is off, but a study reports that validation"):
        read_plan(write(tmp_path, FILE.replace("lr: 0.5", "validate_last: false")))


def test_a_row_may_change_nothing(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path, FILE.replace("{model: {conv: null}}", "")))
    assert plan.runs[0].config.model.conv == "malleable"


def test_aliases_are_not_taken_for_repetitions(tmp_path: Path) -> None:
    text = FILE.replace("RGB: {model: {conv: null}}", "RGB: &rgb {model: {conv: null}}\n  again: *rgb")
    assert {run.row for run in read_plan(write(tmp_path, text)).runs if run.config.model.conv is None} == {
        "RGB",
        "again",
    }


def test_steps_overrule_the_file(tmp_path: Path) -> None:
    assert {run.config.train.steps for run in read_plan(write(tmp_path, FILE), steps=77).runs} == {77}


@pytest.mark.parametrize(("every", "expected"), [(2, 15), (0, 0), (10, 77), (1, 8)])
def test_fewer_or_more_steps_are_validated_as_often(tmp_path: Path, every: int, expected: int) -> None:
    file = write(tmp_path, FILE.replace("steps: 10", f"steps: 10, validate_every: {every}"))
    assert {run.config.train.validate_every for run in read_plan(file, steps=77).runs} == {expected}


def test_a_file_may_build_on_another(tmp_path: Path) -> None:
    write(tmp_path, FILE)
    (tmp_path / "more.yaml").write_text("base: study.yaml\nseeds: [0]\nsettings: {train: {batch_size: 2}}\n")
    run = read_plan(tmp_path / "more.yaml").runs[1]
    assert (run.seed, run.config.train.batch_size, run.config.train.lr) == (0, 2, 1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("lr: 1e-3", "lrr: 1e-3"), r"study\.yaml, row 'extra': .*did you mean 'train.lr'"),
        (("seeds: [7]", "seeds: 7"), "row 'extra': seeds must be a list of whole numbers"),
        (("seeds: [7]", "seeds: [a]"), "row 'extra': seeds must be a list of whole numbers"),
        (("seeds: [7]", "seeds: []"), r"row 'extra': seeds must be .*, at least one, got \[\]"),
        (("seeds: [7]", "seeds: [7, 7]"), "row 'extra': seeds must differ"),
        (("{lr: 0.5}", "{seed: 5}"), "row 'malleable K=3': train.seed is set"),
        (("steps: 10", "steps: ten"), r"row 'extra': train.steps must be a whole number, got ten$"),
        (("steps: 10", "keep: null"), r"row 'extra': train.keep must be a whole number, got null$"),
        (("steps: 10", "seed: !!timestamp 2001-01-01"), r"settings.train.seed must be a number.*got !!timestamp"),
        (
            ("conv: null", "conv: maleable"),
            r"row 'RGB': model.conv must be .* maleable, did you mean 'malleable'\?$",
        ),
        (("resnet18", "resnet19"), r"row 'extra': backbone must be a timm model.* got 'resnet19', .* 'resnet18'\?$"),
        (("{kernels: 5}", "{conv: depth_aware, kernels: 5}"), r"row 'extra': kernels must be 1 for conv='depth_aware'"),
        (("{kernels: 5}", "{kernels: 0}"), r"row 'extra': kernels must be at least 1, got 0$"),
        (("lr: 0.5", "lr: -1"), r"study\.yaml, row 'malleable K=3': train.lr must be positive"),
        (("{lr: 0.5}", "seedy"), "row 'malleable K=3': train must hold settings by name, got 'seedy'"),
        (
            ("train: {lr: 0.5}", "train.lr: 0.5"),
            r"row 'malleable K=3': write the setting 'train.lr' as .*, train: \{lr:",
        ),
        (("{model: {conv: null}}", "{model: null}"), "row 'RGB': model must hold settings by name, got None"),
        (("  RGB:", "  12:"), "names of rows must be text, got 12; put it in quotes"),
        (("  RGB:", "  extra:"), "has 'extra' more than once in a section"),
        (("title: Two methods", "titel: Two methods"), r"yaml: unknown setting 'titel', did you mean 'title'\?$"),
        (("title: Two methods", "title: 5"), r"yaml: title must be text, got 5$"),
        (("title: Two methods", ""), r"yaml: the following arguments are required: title$"),
        (("  RGB:", "  EXTRA:"), "must differ in letters or digits, whatever their case, got 'extra' and 'EXTRA'"),
        (("  RGB:", "  '!?':"), "need a letter or digit, got '!\\?'"),
        (("seeds: [3, 4]", "faults: [no depth]"), r"yaml: faults has no effect without stress: true"),
        (("seeds: [3, 4]", "stress: true\nfaults: [fog]"), r"yaml: faults must be some of .*; no depth;.*got 'fog'$"),
        (("seeds: [3, 4]", "seeds: three"), r"yaml: seeds must be whole numbers, got three$"),
    ],
)
def test_errors_name_what_is_wrong(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_plan(write(tmp_path, FILE.replace(*change)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^there is no file"):
        read_plan(tmp_path / "none.yaml")


def test_a_study_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run"):
        read_plan(write(tmp_path, "title: t\nout: o\nsettings: {}\nrows: {}\n"))


def test_parts_are_disjoint_and_complete(tmp_path: Path) -> None:
    runs = read_plan(write(tmp_path, FILE)).runs
    parts = [part(runs, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(map(str, runs)) == sorted(str(run) for each in parts for run in each)
    assert {len(each) for each in parts} == {1, 2}


@pytest.mark.parametrize("only", ["0/3", "4/3", "2", "a/b", "1/0"])
def test_a_wrong_part_is_refused(tmp_path: Path, only: str) -> None:
    with pytest.raises(UsageError, match=f"got '{only}'"):
        part(read_plan(write(tmp_path, FILE)).runs, only)


STUDIES = [path for path in sorted((ROOT / "studies").glob("*/*.yaml")) if path.stem != "base"]


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_parses_and_begins_with_its_command(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert shlex.split(first.removeprefix("# ")) == ["malleable", "study", str(path.relative_to(ROOT))]
    plan = read_plan(path)
    assert plan.rows[0] == "RGB baseline"
    assert plan.record is None or (ROOT / plan.record / "results.json").is_relative_to(path.parent)
    assert len({str(run.config) for run in plan.runs}) == len(plan.runs)


def test_slugs_are_file_names() -> None:
    assert slug("2.5D, K=3 / a") == "2-5d-k-3-a"
    assert slug("Größe β_1") == "größe-β-1"
