"""Evaluation from the command line down to each count."""

from __future__ import annotations

import csv
import json
import pickle
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import malleable.commands.evaluate
from helpers.toys import Depths, scenes, write_run
from malleable import cli
from malleable.commands.evaluate import show
from malleable.data import FolderWriter
from malleable.inference.evaluate import evaluate_network
from malleable.inference.load import load_trained
from malleable.inference.probabilities import probabilities
from malleable.inference.share import share
from malleable.runs.scores import Protocol, Scores

DATA = scenes()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "x")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scenes as a data set on disk, split ``val``."""
    out = tmp_path_factory.mktemp("data") / "set"
    writer = FolderWriter(out, "tiny", DATA.classes, DATA.palette)
    for index in range(3):
        writer.write(DATA[index])
    writer.finish({"val": DATA.ids[:3]})
    return out


@pytest.fixture
def evaluate(run: Path, folder: Path, tmp_path: Path) -> Callable[..., int]:
    def command(*arguments: str) -> int:
        return cli.main(["evaluate", str(run), "--dataset", str(folder), "--out", str(tmp_path / "r.json"), *arguments])

    return command


class Oracle(nn.Module):
    """Says the label it is given beforehand, or something else."""

    def __init__(self, answers: list[Tensor]) -> None:
        super().__init__()
        self.answers = iter(answers)

    def forward(self, image: Tensor, depth: Tensor, focal: Tensor) -> Tensor:
        return nn.functional.one_hot(next(self.answers), len(DATA.classes)).permute(2, 0, 1)[None].float()


def test_a_perfect_network_scores_100() -> None:
    results = evaluate_network(Oracle([DATA[i].label.clone().clamp(max=10) for i in range(len(DATA))]), DATA)
    assert (results.miou, results.pixel_accuracy, results.mean_accuracy) == (100, 100, 100)


def test_counts_agree_with_a_loop_over_pixels() -> None:
    net = Depths(len(DATA.classes))
    protocol = Protocol(scales=(0.5, 1.0), flip=True, window=(16, 16))
    results = evaluate_network(net, DATA, protocol)
    table = [[0] * len(DATA.classes) for _ in DATA.classes]
    for index in range(len(DATA)):
        guesses = probabilities(net, DATA[index], protocol).argmax(0).flatten().tolist()
        for guess, truth in zip(guesses, DATA[index].label.flatten().tolist(), strict=True):
            if truth != 255:
                table[truth][guess] += 1
    assert results.confusion is not None
    assert results.confusion.tolist() == table
    hits = sum(table[i][i] for i in range(len(table)))
    assert results.pixel_accuracy == pytest.approx(100 * hits / sum(map(sum, table)))


def test_an_absent_class_has_no_iou_and_does_not_count_in_the_mean() -> None:
    data = scenes(1)
    label = data[0].label.clone()
    present = {data.classes[int(index)] for index in label[label != 255].unique()}
    results = evaluate_network(Oracle([label.where(label != 255, label.min())]), data)
    assert {name for name, value in results.iou.items() if value is not None} == present
    assert len(present) < len(data.classes)
    assert results.miou == 100


def test_the_mode_of_every_module_is_left_as_it_was() -> None:
    net = Depths(len(DATA.classes)).train()
    net.frozen = nn.BatchNorm2d(3).eval()
    seen = []
    net.register_forward_hook(lambda module, *_: seen.append(module.training))
    evaluate_network(net, DATA)
    assert net.training
    assert not net.frozen.training
    assert not any(seen)


def test_a_network_of_other_classes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"knows 3 classes but synthetic-rooms.* has 11"):
        evaluate_network(Depths(3), DATA)


def test_an_interrupted_evaluation_leaves_no_thread_behind() -> None:
    """Though the error is kept, and with it the frames of its traceback, as a notebook does."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt) as kept:
        evaluate_network(Depths(len(DATA.classes)), DATA, workers=2, progress=True, after_each=interrupt)
    assert threading.active_count() == before
    assert kept.tb is not None


def _process(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    results = evaluate_network(Depths(len(DATA.classes)), DATA)
    torch.save(results.confusion, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _counting(rank: int, port: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    calls: list[None] = []
    evaluate_network(Depths(len(DATA.classes)), DATA, after_each=lambda: calls.append(None))
    Path(folder, str(rank)).write_text(str(len(calls)))
    torch.distributed.destroy_process_group()


def test_two_processes_count_as_one(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_process, (port, str(tmp_path)), nprocs=2)
    alone = evaluate_network(Depths(len(DATA.classes)), DATA).confusion
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt", weights_only=True).equal(alone)


@pytest.mark.parametrize("verb", ["evaluate", "predict", "export"])
@pytest.mark.parametrize("shared", [False, True], ids=["checkpoint", "safetensors"])
def test_weights_that_are_not_finite_are_an_error(
    verb: str, shared: bool, run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = load_trained(run)
    name = next(name for name, buffer in trained.net.named_buffers() if name.endswith("running_var"))
    trained.net.get_buffer(name)[0] = torch.nan
    if shared:
        share(trained, tmp_path)
    else:
        content = torch.load(run / "checkpoints/step-00000007.pt", weights_only=True)
        torch.save({**content, "model": trained.net.state_dict()}, tmp_path / "nan.pt")
    source = tmp_path if shared else tmp_path / "nan.pt"
    rest = {
        "evaluate": ["--dataset", str(folder)],
        "predict": [str(folder), "--split", "val", "--out", str(tmp_path / "out")],
        "export": [str(tmp_path / "m.onnx")],
    }[verb]
    assert cli.main([verb, str(source), *rest]) == 1
    assert f"{tmp_path / ('model.safetensors' if shared else 'nan.pt')} has weights that are not finite ({name})" in (
        capsys.readouterr().err
    )


def test_without_a_terminal_lines_say_how_far_it_is(
    run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "results.json")
    assert cli.main(["evaluate", str(run), "--dataset", str(folder), "--out", out]) == 0
    assert "tiny/val: 3/3\n" in capsys.readouterr().err


def test_every_process_is_asked_equally_often_whether_to_go_on(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_counting, (port, str(tmp_path)), nprocs=2)
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["3", "3"]  # of five samples


def test_results_json_has_the_promised_keys(run: Path, folder: Path) -> None:
    assert cli.main(["evaluate", str(run / "checkpoints"), "--dataset", str(folder)]) == 0
    results = json.loads((run / "results.json").read_text())
    keys = ["miou", "pixel_accuracy", "mean_accuracy", "iou", "dataset", "split", "scales", "flip", "step"]
    assert list(results) == keys
    assert (results["dataset"], results["split"], results["step"]) == ("tiny", "val", 7)
    assert (results["scales"], results["flip"]) == ([1.0], False)
    assert list(results["iou"]) == list(DATA.classes)


def test_every_output_says_how_it_was_measured(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, matrix = tmp_path / "t.csv", tmp_path / "c.csv"
    options = ["--csv", str(table), "--confusion", str(matrix)]
    assert evaluate("--scales", "0.5", "1", "--flip", "--window", "24", "24", "--overlap", "0.5", *options) == 0
    setting = "multi-scale 0.5, 1 + flip, windows of 24×24 that overlap by 0.5"
    assert setting in " ".join(capsys.readouterr().out.split())
    results = json.loads((tmp_path / "r.json").read_text())
    assert (results["scales"], results["flip"], results["window"]) == ([0.5, 1.0], True, [24, 24])
    assert str(Scores.read(tmp_path / "r.json").protocol) == setting
    lines = list(csv.DictReader(table.open()))
    assert {line["setting"] for line in lines} == {setting}
    assert [line["class"] for line in lines] == [*DATA.classes, "mean", "all pixels"]
    assert float(lines[-2]["iou"]) == results["miou"]
    rows = list(csv.reader(matrix.open()))
    assert setting in rows[0][0]
    assert sum(int(cell) for row in rows[1:] for cell in row[1:]) == sum(
        int((DATA[index].label != 255).sum()) for index in range(3)
    )


def test_results_that_cannot_be_read_are_made_again(run: Path, folder: Path) -> None:
    (run / "results.json").write_text("{}")
    with pytest.warns(UserWarning, match="results.json is not what malleable evaluate writes"):
        assert cli.main(["evaluate", str(run), "--dataset", str(folder), "--overwrite"]) == 0
    assert json.loads((run / "results.json").read_text())["step"] == 7


def test_single_scale_is_said_too(evaluate: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate() == 0
    assert "single scale" in " ".join(capsys.readouterr().out.split())


def test_results_are_not_overwritten_silently(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.json").write_text("mine")
    assert evaluate() == 1
    assert "r.json exists" in capsys.readouterr().err
    assert (tmp_path / "r.json").read_text() == "mine"
    assert evaluate("--overwrite", "--json") == 0
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(capsys.readouterr().out)


def test_scores_are_printed_even_if_they_cannot_be_written(
    evaluate: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(malleable.commands.evaluate, "write_whole", fail)
    assert evaluate("--json") == 1
    assert "miou" in json.loads(capsys.readouterr().out)


def test_scores_are_written_even_if_nobody_reads_what_is_printed(
    evaluate: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unread(_: Scores) -> None:
        raise OSError("nobody reads")

    monkeypatch.setattr(malleable.commands.evaluate, "show", unread)
    assert evaluate() == 1
    assert "miou" in json.loads((tmp_path / "r.json").read_text())


@pytest.mark.parametrize("names", [("--csv", "r.json"), ("--csv", "x.csv", "--confusion", "./x.csv")])
def test_outputs_do_not_replace_each_other(
    evaluate: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    names: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert evaluate(*names, "--overwrite") == 1
    assert "out, csv and confusion must be different files" in capsys.readouterr().err


def test_names_of_classes_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    iou: dict[str, float | None] = {"[wall]": 1.0, "[/x]": 2.0}
    show(Scores(1.0, 1.0, 1.0, iou, "tiny", "val", Protocol(), None, accuracy=iou))
    assert {"[wall]", "[/x]"} <= set(capsys.readouterr().out.split())


def test_a_run_knows_its_data(folder: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", root=folder)
    assert cli.main(["evaluate", str(run / "checkpoints" / "step-00000007.pt")]) == 0
    assert json.loads((run / "results.json").read_text())["dataset"] == "tiny"


def test_a_checkpoint_knows_its_run_from_inside_of_its_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "x", root=folder)
    monkeypatch.chdir(run / "checkpoints")
    assert cli.main(["evaluate", "step-00000007.pt"]) == 0
    assert (run / "results.json").exists()


def test_averaged_weights_are_preferred(tmp_path: Path) -> None:
    trained = load_trained(write_run(tmp_path / "x", ema=True))
    assert all(not value.any() for value in trained.net.state_dict().values())


class Touch:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("verb", ["evaluate", "predict", "export", "push", "figures"])
def test_a_checkpoint_that_would_run_code_is_refused(
    verb: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    touched, evil = tmp_path / "touched", tmp_path / "evil.pt"
    torch.save({"format": 1, "model": Touch(touched)}, evil)
    image = str(next((folder / "images").iterdir()))
    rest = {
        "evaluate": [],
        "predict": [image],
        "export": [str(tmp_path / "m.onnx")],
        "push": [str(tmp_path / "m")],
        "figures": [],
    }
    assert cli.main([verb, str(evil), *rest[verb]]) == 1
    assert "could run code" in capsys.readouterr().err
    assert not touched.exists()
    torch.load(evil, weights_only=False)  # it would have
    assert touched.exists()


def test_a_plain_pickle_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    touched, evil = tmp_path / "touched", tmp_path / "evil.pt"
    evil.write_bytes(pickle.dumps(Touch(touched)))
    assert cli.main(["evaluate", str(evil)]) == 1
    assert "damaged or no checkpoint" in capsys.readouterr().err
    assert not touched.exists()
