"""The report of runs: what it says, and that it stands alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
from matplotlib.figure import Figure

from helpers.markup import Markup
from helpers.outcomes import CLASSES, write_outcome
from helpers.toys import write_run
from malleable import cli
from malleable.reports.report import write_report
from malleable.runs.config import ModelConfig

MALLEABLE = ModelConfig("resnet10t", pretrained=False)
EVIL = "<script>alert(1)"


def report(tmp_path: Path, groups: dict[str, list[Path]], **options: str) -> Markup:
    out = tmp_path / "report.html"
    write_report(groups, out, options.pop("title", "Title"), **options)
    return Markup(out.read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Markup:
    folder = tmp_path_factory.mktemp("two")
    groups = {
        "RGB": [write_outcome(folder / "rgb", validated=37.8)],
        "ours": [write_outcome(folder / "ours", MALLEABLE, validated=41.2)],
    }
    return report(folder, groups, intro="Said before.")


def test_without_a_terminal_lines_say_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(tmp_path, {"RGB": [write_outcome(tmp_path / "rgb")]})
    assert "report.html: 3/3\n" in capsys.readouterr().err


def test_the_first_sentence_is_the_one_that_matters(two: Markup) -> None:
    assert two.text.startswith("Title Title ours reaches 41.2 mIoU , 3.4 above RGB.")
    assert "Said before." in two.text


@pytest.mark.parametrize("text", [
    "+3.40",                                  # difference
    "41.20", "61.20", "51.20",                # mIoU, pixel and mean accuracy
    "synthetic-rooms val, single scale",
    "last validation, step 20",
    "20 steps × 4 images of 64×96",
    "resnet10t",
    "model.conv null malleable",              # the one setting that differs
    "Train it again in a new folder:",
])  # fmt: skip
def test_the_page_says(two: Markup, text: str) -> None:
    assert text in two.text


def test_settings_that_agree_are_not_in_the_table_of_differences(two: Markup) -> None:
    assert two.text.count("train.steps") == 0
    assert two.text.count("model.conv") == 1


def test_the_page_is_sound_and_stands_alone(two: Markup) -> None:
    assert not two.faults
    assert {tag for tag, _ in two.tags}.isdisjoint({"script", "link", "iframe", "object", "base"})
    targets = [attributes[key] for _, attributes in two.tags for key in ("src", "href", "srcset") if key in attributes]
    assert targets
    assert all(str(target).startswith(("data:image/", "#")) for target in targets)
    ids = [attributes["id"] for _, attributes in two.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {f"#{anchor}" for anchor in ids} >= {link["href"] for link in two.all("a")}


def test_the_page_can_be_read_aloud(two: Markup) -> None:
    assert two.all("html") == [{"lang": "en"}]
    assert two.all("img")
    assert all(image["alt"] for image in two.all("img"))
    headings = [int(tag[1]) for tag, _ in two.tags if tag in ("h1", "h2", "h3", "h4")]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(headings))
    assert all(cell.get("scope") in ("row", "col") for cell in two.all("th"))


def test_names_of_runs_and_classes_are_text(tmp_path: Path) -> None:
    run = write_outcome(tmp_path / "x", validated=40.0, classes=[EVIL], root=EVIL)
    markup = report(tmp_path, {EVIL: [run]}, title=EVIL, intro=EVIL)
    assert not markup.faults
    assert not markup.all("script")
    assert markup.text.count(f"Measured on {EVIL} val") == 1
    assert markup.text.count(EVIL) >= 6


@pytest.mark.parametrize(("rgb", "ours", "sentence"), [
    (40.0, 40.04, "ours reaches 40.0 mIoU , level with RGB."),
    (40.0, 39.0, "ours reaches 39.0 mIoU , 1.0 below RGB."),
    (40.0, None, "RGB reaches 40.0 mIoU ."),
    (None, 40.0, "ours reaches 40.0 mIoU ."),
    (None, None, "No run has a result yet."),
])  # fmt: skip
def test_headlines(tmp_path: Path, rgb: float | None, ours: float | None, sentence: str) -> None:
    groups = {
        "ours": [write_outcome(tmp_path / "ours", MALLEABLE, validated=ours)],
        "RGB": [write_outcome(tmp_path / "rgb", validated=rgb)],
    }
    assert report(tmp_path, groups).text.startswith(f"Title Title {sentence}")


def with_seeds(folder: Path, reached: dict[str, tuple[float, ...]]) -> dict[str, list[Path]]:
    """Runs of seeds 0, 1, … with these mIoU."""
    return {
        name: [write_outcome(folder / f"{name}{seed}", validated=miou, seed=seed) for seed, miou in enumerate(values)]
        for name, values in reached.items()
    }


def test_the_headline_speaks_of_the_first_malleable_row_whatever_the_others_reach(tmp_path: Path) -> None:
    groups = {
        "ours": [write_outcome(tmp_path / "ours", MALLEABLE, validated=39.0)],
        "K=5": [write_outcome(tmp_path / "five", replace(MALLEABLE, kernels=5), validated=45.0)],
        "RGB": [write_outcome(tmp_path / "rgb", validated=37.0)],
        "best": [write_outcome(tmp_path / "best", replace(MALLEABLE, conv="conv25d"), validated=50.0)],
    }
    assert report(tmp_path, groups).text.startswith("Title Title ours reaches 39.0 mIoU , 2.0 above RGB.")
    del groups["ours"], groups["K=5"]
    assert report(tmp_path, groups).text.startswith("Title Title best reaches 50.0 mIoU , 13.0 above RGB.")


def test_differences_are_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    groups = with_seeds(tmp_path, {"RGB": (10.0, 14.0, 18.0), "K=5": (13.0,), "K=3": (11.0, 15.0, 19.0)})
    text = report(tmp_path, groups).text
    assert text.startswith("Title Title K=3 reaches 15.0 mIoU , 1.0 above RGB.")
    assert "13.00 +3.00 33.00" in text
    assert "15.00 ± 4.00 n = 3 +1.00 ± 0.00 n = 3 35.00" in text


def test_an_unfinished_run_is_not_compared_with_a_finished_one(tmp_path: Path) -> None:
    groups = {
        "RGB": [write_outcome(tmp_path / "rgb", validated=37.8)],
        "ours": [write_outcome(tmp_path / "ours", MALLEABLE, validated=38.8, done=15)],
        "less": [write_outcome(tmp_path / "less", MALLEABLE, validated=30.0)],
    }
    text = report(tmp_path, groups).text
    assert text.startswith("Title Title ours reaches 38.8 mIoU .")
    assert "Not finished yet: ours. Not compared with RGB: ours (38.8 mIoU)." in text
    assert "unfinished, step 15 of 20" in text
    assert "Go on with it:" in text
    assert "last validation, step 15" in text
    assert "38.80 – 58.80" in text


def test_what_was_measured_otherwise_is_named_below_the_headline(tmp_path: Path) -> None:
    rgb = write_outcome(tmp_path / "rgb", miou=10.0, scales=[0.5, 1.0])
    ours, out = write_outcome(tmp_path / "ours", MALLEABLE, miou=30.0), tmp_path / "r.html"
    assert cli.main(["report", str(rgb), str(ours), "--out", str(out)]) == 0
    text = Markup(out.read_text()).text
    assert text.startswith("Report Report malleable K=3 reaches 30.0 mIoU .")
    assert "Not compared with RGB baseline: malleable K=3 (30.0 mIoU)." in text
    assert "Compared are only scores that were measured alike" in text


@pytest.mark.parametrize(("seed", "words"), [(0, "to RGB, seed by seed."), (7, "to RGB.")])
def test_differences_are_called_seed_by_seed_only_if_they_are(tmp_path: Path, seed: int, words: str) -> None:
    rgb = write_outcome(tmp_path / "rgb", validated=30.0)
    ours = write_outcome(tmp_path / "ours", ModelConfig("resnet10t", pretrained=False), validated=31.0, seed=seed)
    assert f"Differences are {words}" in report(tmp_path, {"RGB": [rgb], "ours": [ours]}).text


def test_unfinished_seeds_are_named(tmp_path: Path) -> None:
    done = enumerate((20, 4, 8))
    seeds = [write_outcome(tmp_path / str(seed), seed=seed, done=steps, validated=30.0) for seed, steps in done]
    assert "unfinished: seed 1 at step 4, seed 2 at step 8 of 20" in report(tmp_path, {"RGB": seeds}).text


def test_a_loss_has_a_minus_sign(tmp_path: Path) -> None:
    groups = {name: [write_outcome(tmp_path / name, validated=miou)] for name, miou in (("RGB", 40.0), ("x", 38.5))}
    assert "38.50 −1.50 58.50" in report(tmp_path, groups).text


def test_seeds_are_shown_with_their_deviation(tmp_path: Path) -> None:
    seeds = [write_outcome(tmp_path / str(s), validated=40.0 + s, seed=s) for s in range(3)]
    text = report(tmp_path, {"RGB": seeds}).text
    assert "41.00 ± 1.00 n = 3" in text
    assert "RGB, seed 2" in text


def test_differences_over_seeds_have_a_p_value(tmp_path: Path) -> None:
    """The differences are 1, 2 and 6: a mean of 3 and t = 1.964 with two degrees of freedom."""
    groups = with_seeds(tmp_path, {"RGB": (10.0, 10.0, 10.0), "K=3": (11.0, 12.0, 16.0)})
    text = report(tmp_path, groups).text
    assert "+3.00 ± 2.65 n = 3 0.188 33.00" in text
    assert "(two-sided paired t-test, not corrected for the number of rows)" in text
    said = "K=3 reaches 13.0 mIoU , 3.0 above RGB (95 % interval −3.57 to +9.57, p = 0.188, 3 seeds)."
    assert text.startswith(f"Title Title {said}")
    assert "23.00 ± 2.65 −3.57 to +9.57" in text


def test_bars_carry_names_once_there_are_more_runs_than_colours(tmp_path: Path) -> None:
    run = write_outcome(tmp_path / "x", validated=40.0)
    for count, seen in ((7, 1), (8, 1 + len(CLASSES))):
        markup = report(tmp_path, {f"run {number}": [run] for number in range(count)})
        assert sum(attributes.get("class") == "bars named" for attributes in markup.all("ul")) == seen


def test_a_single_run_is_not_counted(two: Markup) -> None:
    assert "n = " not in two.text


def test_the_paper_s_row_is_labelled_by_its_data_and_budget(tmp_path: Path) -> None:
    run = write_outcome(tmp_path / "x", MALLEABLE, validated=30.0, root="/nowhere/nyudv2-half")
    text = report(tmp_path, {"ours": [run]}).text
    assert "48.80" in text
    assert "Tables 2 and 4 to 7: NYUDv2 full size, ResNet-50, 40k iterations, single scale" in text
    assert "half-size, 8-bit-recovered depth" in text


def test_without_a_row_of_the_paper_there_is_no_column(two: Markup) -> None:
    assert "paper" not in two.text


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    run = write_outcome(tmp_path / "x", validated=30.0, root="/nowhere/set")
    assert (
        "Figures that need the data are left out: /nowhere/set is neither a folder"
        in report(tmp_path, {"x": [run]}).text
    )
    with patch("malleable.reports.report.run_figures", side_effect=RuntimeError("no ink")):
        markup = report(tmp_path, {"x": [run]})
    assert "The figures could not be drawn: no ink." in markup.text
    assert "30.00" in markup.text


def test_runs_on_different_data_are_not_shown_on_one_picture(tmp_path: Path) -> None:
    groups = {root: [write_outcome(tmp_path / root, root=root)] for root in ("rooms", "streets")}
    drawn = dict.fromkeys(("training", "qualitative"), Figure())
    with patch("malleable.reports.report.comparison_figures", return_value=drawn):
        text = report(tmp_path, groups).text
    assert "the runs were trained on different data" in text
    assert "Examples" not in text


def test_a_run_with_a_checkpoint_is_drawn(tmp_path: Path) -> None:
    folder = write_outcome(tmp_path / "x", ModelConfig("resnet10t", kernels=1, stages=(3,), pretrained=False))
    write_run(folder)
    images = report(tmp_path, {"x": [folder]}).all("img")
    assert any(str(image["src"]).startswith("data:image/png") for image in images)
    assert any(str(image["src"]).startswith("data:image/svg+xml") for image in images)


def test_the_command_writes_a_file_and_leaves_others_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = write_outcome(tmp_path / "x", validated=40.0), tmp_path / "r.html"
    command = ["report", str(run), str(write_outcome(tmp_path / "y", MALLEABLE)), "--out", str(out)]
    out.write_text("mine")
    assert cli.main(command) == 1
    assert "r.html exists and is left as it is" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert cli.main([*command, "--overwrite", "--title", "Ours"]) == 0
    assert "shows 2 runs" in capsys.readouterr().out
    assert Markup(out.read_text()).text.startswith("Ours Ours RGB baseline reaches 40.0 mIoU .")


def test_a_folder_given_twice_is_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_outcome(tmp_path / "a", validated=40.0)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "a", "./a", str(run), "a/../a", "--out", "r.html"]) == 0
    assert "shows 1 run\n" in capsys.readouterr().out
    assert "n = " not in Markup(Path("r.html").read_text()).text


def test_a_later_evaluation_changes_only_what_the_command_shows(tmp_path: Path) -> None:
    run, out = write_outcome(tmp_path / "x", validated=30.0, miou=50.0, flip=True), tmp_path / "r.html"
    assert report(tmp_path, {"RGB": [run]}).text.startswith("Title Title RGB reaches 30.0 mIoU .")
    assert cli.main(["report", str(run), "--out", str(out)]) == 0
    text = Markup(out.read_text()).text
    assert text.startswith("Report Report RGB baseline reaches 50.0 mIoU .")
    assert "results.json, step 20" in text


def test_a_folder_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 1
    assert "holds no run" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()
