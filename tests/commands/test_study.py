"""A study from file to table. A stand-in for training writes what a run leaves, so that only the study is tested."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import malleable.commands.study
from helpers.runs import make_data, start
from malleable import cli
from malleable.commands.study import next_task
from malleable.commands.train import train
from malleable.reports.plan import read_plan
from malleable.runs.folder import write_settings
from malleable.runs.scores import Protocol, Scores
from malleable.runs.settings import resolve

STAND_IN = """
import json, pathlib, sys, yaml
config = pathlib.Path(sys.argv[sys.argv.index("--config") + 1])
settings = yaml.safe_load(config.read_text())
train, kernels = settings["train"], settings["model"]["kernels"]
with open({log!r}, "a") as file:
    print(kernels, train["seed"], file=file)
if kernels == {bad}:
    sys.exit({code})
row = {{"step": train["steps"], "images_per_second": 1.0, "val/miou": 10.0 * kernels + train["seed"]}}
row |= {{"val/pixel_accuracy": 50.0, "val/mean_accuracy": 40.0, "val/iou/wall": 30.0}}
(config.parent / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
"""


def write_tiny(folder: Path, steps: int, stress: bool = False, seeds: int = 1) -> Path:
    """A study of one small network on tiny rooms."""
    settings = {
        "model": {"backbone": "resnet10t", "pretrained": False, "stages": [3]},
        "data": {"root": str(make_data(folder / "tiny")), "crop": [32, 32], "workers": 0},
        "train": {"steps": steps, "batch_size": 2, "log_every": 1},
    }
    faults = {"stress": True, "faults": ["no depth", "depth × 4"], "also": ["train"]} if stress else {}
    runs = {"rows": {"ours": {}}, "seeds": list(range(seeds)), **faults}
    study = {"title": "Tiny", "out": str(folder / "out"), "settings": settings, **runs}
    (folder / "study.yaml").write_text(json.dumps(study))  # JSON is YAML
    return folder / "study.yaml"


class Study:
    """A study of rows K=1 and K=2 with seeds 0 and 1 in ``folder``, whose runs the stand-in makes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.out, self.log = folder, folder / "out", folder / "started"
        self.data = make_data(folder / "tiny")
        self.file = folder / "study.yaml"
        self.write("")
        self.pages: list[dict[str, list[Path]]] = []
        monkeypatch.setattr(malleable.commands.study, "write_report", lambda groups, *_: self.pages.append(groups))

    def write(self, train: str) -> None:
        settings = f"{{model: {{pretrained: false}}, data: {{root: {self.data}}}, train: {{steps: 4, {train}}}}}"
        rows = "{K=1: {model: {kernels: 1}}, K=2: {model: {kernels: 2}}}"
        self.file.write_text(f"title: Kernels\nout: {self.out}\nseeds: [0, 1]\nsettings: {settings}\nrows: {rows}\n")

    def run(self, *arguments: str, bad: int = 0, code: int = 0) -> int:
        stand_in = self.folder / "stand_in.py"
        stand_in.write_text(STAND_IN.format(log=str(self.log), bad=bad, code=code))
        return cli.main(["study", str(self.file), "--launcher", f"{sys.executable} {stand_in}", *arguments])

    def started(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def means(self, folder: Path | None = None) -> dict[str, float]:
        rows = json.loads(((folder or self.out) / "results.json").read_text())["rows"]
        return {row["name"]: row["miou"]["mean"] for row in rows}


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    return Study(tmp_path, monkeypatch)


def test_all_runs_are_made_seed_by_seed_and_reported(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.run() == 0
    assert study.started() == ["1 0", "2 0", "1 1", "2 1"]
    assert study.means() == {"K=1": 10.5, "K=2": 20.5}
    assert "| K=2 | 2 | 20.50 ± 0.71 |" in (study.out / "table.md").read_text()
    assert study.pages == [{"K=1": [study.out / "k-1/seed0", study.out / "k-1/seed1"],
                            "K=2": [study.out / "k-2/seed0", study.out / "k-2/seed1"]}]  # fmt: skip
    assert f"open {(study.out / 'report.html').as_uri()} in a browser" in capsys.readouterr().out


def test_what_is_done_is_not_done_again(study: Study) -> None:
    study.run()
    (study.out / "k-1/seed1/metrics.jsonl").write_text("")
    results = json.loads((study.out / "results.json").read_text())
    del results["rows"][0]["runs"]["1"]
    (study.out / "results.json").write_text(json.dumps(results))
    assert study.run() == 0
    assert study.started()[4:] == ["1 1"]


def test_kept_results_stand_for_runs_whose_folders_are_gone(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    kept = study.folder / "kept"
    study.run("--record", str(kept))
    assert sorted(path.name for path in (kept / "logs").iterdir()) == [
        f"k-{k}-seed{s}.jsonl" for k in (1, 2) for s in (0, 1)
    ]
    study.out.rename(study.folder / "elsewhere")
    assert study.run("--record", str(kept)) == 0
    assert len(study.started()) == 4
    assert study.means(kept) == {"K=1": 10.5, "K=2": 20.5}
    assert f"no report: {study.out} has no folder of K=1, seed 0; K=2, seed 0" in capsys.readouterr().err


def test_a_report_is_not_replaced_by_one_of_fewer_runs(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    study.run()
    (study.out / "k-1/seed1").rename(study.folder / "elsewhere")
    assert study.run("--collect") == 0
    assert f"no report: {study.out} has no folder of K=1, seed 1\n" in capsys.readouterr().err
    assert len(study.pages) == 1


def test_parts_make_the_whole(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.run("--only", "1/2") == 0
    assert study.started() == ["1 0", "1 1"]
    assert "2 of 4 runs have no result yet: K=2, seed 0; K=2, seed 1" in capsys.readouterr().err
    assert not study.pages
    assert study.run("--only", "2/2") == 0
    assert (study.started()[2:], len(study.pages)) == (["2 0", "2 1"], 1)


def test_a_wrong_part_leaves_nothing_behind(study: Study) -> None:
    assert study.run("--only", "5/4") == 2
    assert not study.out.exists()


def test_a_run_that_fails_does_not_keep_the_others_back(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.run(bad=1, code=3) == 1
    assert study.started() == ["1 0", "2 0", "1 1", "2 1"]
    assert study.means() == {"K=2": 20.5}
    assert "K=1, seed 0 failed with exit code 3" in capsys.readouterr().err


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_results_that_cannot_be_kept_end_the_study_at_once(
    study: Study, jobs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run ends; any other would go on for long."""
    gather = malleable.commands.study.gather
    stand_in = study.folder / "second_is_long.py"
    stand_in.write_text(
        f"import time\nlog = open({str(study.log)!r}, 'a')\nfirst = not log.tell()\nlog.write('run\\n')\nlog.flush()\n"
        "if not first:\n    time.sleep(20)\n    log.write('ended\\n')\n"
    )

    def fail_later(*arguments: Any) -> Any:
        if study.started():
            raise OSError("no space left")
        return gather(*arguments)

    monkeypatch.setattr(malleable.commands.study, "gather", fail_later)
    launcher = f"{sys.executable} {stand_in}"
    assert cli.main(["study", str(study.file), "--launcher", launcher, "--jobs", jobs]) == 1
    assert "no space left" in capsys.readouterr().err
    assert "ended" not in study.started()
    assert len(study.started()) < 4


def test_several_runs_at_a_time(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.run("--jobs", "3", bad=1, code=3) == 1
    assert sorted(study.started()) == ["1 0", "1 1", "2 0", "2 1"]
    assert study.means() == {"K=2": 20.5}
    assert "K=1, seed 1 failed with exit code 3; going on with the others" in capsys.readouterr().err
    assert study.run("--jobs", "0") == 2
    assert "jobs must be at least 1, got 0" in capsys.readouterr().err


def test_a_stopped_run_stops_the_study(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.run(bad=1, code=130) == 130
    assert study.started() == ["1 0"]
    assert "the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "jobs"), [(signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_a_signal_reaches_the_runs_and_their_work_is_kept(tmp_path: Path, number: signal.Signals, jobs: int) -> None:
    """SIGINT goes to all processes, as a terminal sends it; SIGTERM to the study alone."""
    file = write_tiny(tmp_path, steps=5000, seeds=jobs)
    study = start(["-m", "malleable", "study", str(file), "--jobs", str(jobs)], start_new_session=True)
    folders = [tmp_path / f"out/ours/seed{seed}" for seed in range(jobs)]
    logs = [folder / "metrics.jsonl" for folder in folders]
    deadline = time.monotonic() + 100
    while not all(log.exists() and log.read_text() for log in logs) and time.monotonic() < deadline:
        time.sleep(0.1)
    (os.killpg if number is signal.SIGINT else os.kill)(study.pid, number)
    _, error = study.communicate(timeout=60)
    assert (study.returncode, "the same command goes on" in error) == (128 + number, True)
    assert all(list((folder / "checkpoints").glob("step-*.pt")) for folder in folders)
    assert jobs == 1 or "ours, seed 1: " in error


def test_other_settings_than_those_of_the_results_are_refused(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    study.run()
    study.write("lr: 0.5")
    assert study.run() == 1
    assert "K=1, seed 0 with other settings: train.lr was 0.01 and is 0.5" in capsys.readouterr().err
    (study.out / "results.json").unlink()
    (study.out / "table.md").unlink()
    assert study.run() == 1
    assert "seed0 was started with other settings: train.lr was 0.01 and is 0.5" in capsys.readouterr().err


def test_steps_make_runs_in_a_folder_of_their_own(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.run("--steps", "9") == 2
    assert "folder of their own with --out" in capsys.readouterr().err
    short = study.folder / "short"
    assert study.run("--steps", "9", "--out", str(short)) == 0
    assert json.loads((short / "k-1/seed0/metrics.jsonl").read_text())["step"] == 9
    assert study.means(short) == {"K=1": 10.5, "K=2": 20.5}
    assert not study.out.exists()


def test_another_out_leaves_the_file_s_record_alone(study: Study) -> None:
    study.file.write_text(f"{study.file.read_text()}record: {study.folder / 'kept'}\n")
    assert study.run("--out", str(study.folder / "other")) == 0
    assert not (study.folder / "kept").exists()


def test_results_that_are_not_asked_for_any_more_are_not_forgotten(
    study: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    study.run()
    before = (study.out / "results.json").read_text()
    study.file.write_text(study.file.read_text().replace("seeds: [0, 1]", "seeds: [0]"))
    assert study.run() == 1
    assert "does not ask for any more: K=1, seed 1; K=2, seed 1" in capsys.readouterr().err
    assert (study.out / "results.json").read_text() == before


@pytest.mark.parametrize(("name", "option"), [("table.md", "--record"), ("report.html", "--report")])
def test_files_of_others_are_left_alone(
    study: Study, name: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    study.out.mkdir()
    (study.out / name).write_text("mine")
    assert study.run() == 1
    assert (study.out / name).read_text() == "mine"
    assert option in capsys.readouterr().err
    assert not study.started()


def test_a_results_file_of_another_kind_is_refused(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    study.out.mkdir()
    (study.out / "results.json").write_text('{"miou": 3}')
    assert study.run() == 1
    assert "is not what a study writes" in capsys.readouterr().err


def test_collecting_starts_nothing(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    study.run("--only", "1/2")
    before = study.started()
    assert study.run("--collect") == 0
    assert study.started() == before
    assert "2 of 4 runs have no result yet" in capsys.readouterr().err


def test_runs_that_only_lack_their_tests_are_told_from_untrained_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher that only queues has trained one of two, and tested none."""
    file = write_tiny(tmp_path, steps=2, stress=True, seeds=2)
    run = read_plan(file).runs[0]
    write_settings(tmp_path / "out" / run.folder, run.config)
    (tmp_path / "out" / run.folder / "metrics.jsonl").write_text('{"step": 2, "val/miou": 1.0}\n')
    trained = "1 of 2 runs are trained, but not tested yet: ours, seed 0"
    assert cli.main(["study", str(file), "--collect"]) == 0
    printed = capsys.readouterr().err
    assert f"{trained}; to test them, start the study again without --collect, with its --launcher\n" in printed
    assert "1 of 2 runs have no result yet: ours, seed 1\n" in printed
    assert cli.main(["study", str(file), "--launcher", f"{sys.executable} -c pass"]) == 0
    assert f"{trained}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--only", "1/2"), "only=1/2 has no meaning"), (("--out", "typo"), "there is nothing to collect: neither typo")],
)
def test_collecting_in_vain_is_refused(
    study: Study, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert study.run("--collect", *arguments) != 0
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("typo").exists()


def test_processes_that_collect_at_the_same_time_do_not_disturb_each_other(study: Study) -> None:
    study.run()
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from malleable.reports.plan import read_plan\nfrom malleable.commands.study import gather\n"
        "file, out = map(Path, sys.argv[1:])\n"
        "for _ in range(20): assert len(gather(read_plan(file), out, out)) == 4"
    )
    processes = [start(["-c", code, str(study.file), str(study.out)]) for _ in range(2)]
    assert [(process.communicate(timeout=100)[1][-300:], process.returncode) for process in processes] == [("", 0)] * 2


def test_a_study_that_was_told_to_stop_starts_no_other_run(study: Study) -> None:
    """Even if the run that it told in turn ends well."""
    stand_in = study.folder / "patient.py"
    stand_in.write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        f"open({str(study.log)!r}, 'a').write('run\\n')\ntime.sleep(60)\n"
    )
    launcher = f"{sys.executable} {stand_in}"
    process = start(["-m", "malleable", "study", str(study.file), "--launcher", launcher])
    deadline = time.monotonic() + 100
    while not study.started() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert (process.returncode, study.started()) == (128 + signal.SIGTERM, ["run"])


def test_a_signal_while_a_run_is_being_started_reaches_it(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def starting(command: list[str], **options: Any) -> subprocess.Popen[Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return popen(command, **options)

    monkeypatch.setattr(subprocess, "Popen", starting)
    patient = study.folder / "patient.py"
    patient.write_text("import time\ntime.sleep(60)\n")
    began = time.monotonic()
    assert cli.main(["study", str(study.file), "--launcher", f"{sys.executable} {patient}"]) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 50


def test_it_trains_for_real_and_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert cli.main(["study", str(write_tiny(tmp_path, steps=2, stress=True)), "--report", str(page)]) == 0
    assert "ours" in page.read_text()
    assert "<h2>Faults of depth</h2>" in page.read_text()
    assert "| no depth |" in (tmp_path / "out/table.md").read_text()
    (row,) = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert 0 <= row["miou"]["mean"] <= 100
    assert list(row["stress"]) == ["depth × 4", "no depth"]
    assert list(row["splits"]) == ["train"]
    assert "<h2>Other splits</h2>" in page.read_text()
    assert row["stress"]["depth × 4"]["mean"] == row["miou"]["mean"]
    assert row["runs"]["0"]["stress"]["depth × 4"] == row["miou"]["mean"]
    assert "layer2.0.conv1/temperature" in row["runs"]["0"]["receptive_field"]
    assert str(page) in capsys.readouterr().out


def test_a_split_that_is_not_there_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_tiny(tmp_path, steps=2, stress=True)
    file.write_text(file.read_text().replace('"also": ["train"]', '"also": ["night"]'))
    assert cli.main(["study", str(file)]) == 2
    assert "also must be some of the splits of" in capsys.readouterr().err
    (tmp_path / "tiny/labels").rename(tmp_path / "tiny/none")
    file.write_text(file.read_text().replace('"also": ["night"]', '"also": ["val"]'))
    assert cli.main(["study", str(file)]) == 2
    assert "also must be splits with labels, to be scored; 'val' of" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def evaluated(folder: Path, protocol: Protocol, **beyond: Any) -> tuple[Path, Path]:
    """A tiny study whose run is trained, and has a results.json: the study's file and the results'."""
    file = write_tiny(folder, steps=2, stress=True)
    (run,) = read_plan(file).runs
    results = folder / "out" / run.folder / "results.json"
    write_settings(results.parent, run.config)
    (results.parent / "metrics.jsonl").write_text('{"step": 2, "val/miou": 1.0}\n')
    scores = Scores(1.0, 1.0, 1.0, {}, "tiny", "val", protocol, 2, **beyond)
    results.write_text(json.dumps(scores.to_dict()))
    return file, results


def test_runs_in_another_folder_or_a_moved_one_are_trained_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = read_plan(write_tiny(tmp_path, steps=2))
    (run,) = plan.runs
    for folder in (Path("other", run.folder), Path("moved", run.folder)):
        verb, *words = next_task(run, folder, plan) or []
        settings = resolve(words, get_type_hints(train))[0]
        assert (verb, json.loads(settings.removeprefix("--config="))["out"]) == ("train", str(folder))
        Path(folder.parts[0]).rename("moved")


def test_scores_that_were_measured_in_another_way_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, results = evaluated(tmp_path, Protocol(scales=(0.75, 1.0), flip=True))
    before = results.read_text()
    assert cli.main(["study", str(file)]) == 1
    assert f"{results} is of another split, step or way" in capsys.readouterr().err
    assert results.read_text() == before


def test_faults_and_splits_that_the_study_does_not_ask_for_are_not_lost(tmp_path: Path) -> None:
    file, results = evaluated(tmp_path, Protocol(), stress={"noise of 2 %": 1.0}, splits={"test": 1.0})
    plan = read_plan(file)
    assert next_task(plan.runs[0], results.parent, plan) == [
        "evaluate",
        str(results.parent),
        "--stress",
        "--overwrite",
        '--faults=["depth × 4", "no depth", "noise of 2 %"]',
        '--also=["train", "test"]',
    ]


def test_a_network_of_one_s_own_is_trusted_when_it_is_tested(tmp_path: Path) -> None:
    """The study's file is one's own, and training has run the code already."""
    file = write_tiny(tmp_path, steps=2, stress=True)
    model = '"model": {"network": "mine:build", "pretrained": false}'
    file.write_text(re.sub(r'"model": \{[^}]*\}', model, file.read_text()))
    plan = read_plan(file)
    (run,) = plan.runs
    folder = tmp_path / "out" / run.folder
    write_settings(folder, run.config)
    (folder / "metrics.jsonl").write_text('{"step": 2, "val/miou": 1.0}\n')
    assert "--trust" in (next_task(run, folder, plan) or [])


def test_what_is_asked_for_later_is_measured_without_training_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(malleable.commands.study, "write_report", lambda *_: None)
    file = write_tiny(tmp_path, steps=2, stress=True)
    whole = file.read_text()
    file.write_text(whole.replace('"no depth", ', "").replace('"also": ["train"]', '"also": []'))
    assert cli.main(["study", str(file)]) == 0
    run = tmp_path / "out/ours/seed0"
    trained = (run / "metrics.jsonl").read_bytes()
    before = json.loads((tmp_path / "out/results.json").read_text())
    file.write_text(whole)
    assert cli.main(["study", str(file), "--collect"]) == 0
    assert json.loads((tmp_path / "out/results.json").read_text()) == before  # nothing is forgotten meanwhile
    assert cli.main(["study", str(file)]) == 0
    assert (run / "metrics.jsonl").read_bytes() == trained
    (row,) = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert list(row["stress"]) == ["depth × 4", "no depth"]
    assert list(row["splits"]) == ["train"]
    capsys.readouterr()
    run.rename(tmp_path / "elsewhere")
    file.write_text(whole.replace('"no depth"', '"no depth", "noise of 2 %"'))
    assert cli.main(["study", str(file)]) == 0
    assert "lack some of the faults or splits: ours, seed 0" in capsys.readouterr().err
