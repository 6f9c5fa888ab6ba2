"""Networks that travel: what is written, what is not, and that they come back the same."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch

from helpers.toys import scenes, write_run
from malleable import cli
from malleable.inference.card import card
from malleable.inference.load import load_trained
from malleable.models import DeepLabV3Plus
from malleable.runs.scores import Protocol, Scores

FILES = ["README.md", "config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "x")
    (folder / "secret.txt").write_text("not to be shared")
    return folder


def same(one: Any, other: Any) -> None:
    for (name, value), (twin, copy) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert name == twin
        assert value.equal(copy)


def test_a_folder_and_back(run: Path, tmp_path: Path) -> None:
    shared, pulled = tmp_path / "shared", tmp_path / "pulled"
    assert cli.main(["push", str(run), str(shared)]) == 0
    assert sorted(path.name for path in shared.iterdir()) == FILES
    assert cli.main(["pull", str(shared), str(pulled)]) == 0
    original, copy = load_trained(run), load_trained(pulled)
    same(original.net, copy.net)
    assert (copy.classes, copy.palette, copy.step) == (scenes().classes, scenes().palette, 7)
    assert copy.dataset == scenes().name
    same(original.net, DeepLabV3Plus.from_pretrained(shared))


@pytest.mark.parametrize("name", ["config.yaml", "checkpoints"])
def test_a_network_does_not_take_the_place_of_a_run(
    run: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).touch()
    assert cli.main(["push", str(run), str(tmp_path), "--overwrite"]) == 1
    assert f"{tmp_path} is a run's folder (it holds {name})" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_run_with_a_network_beside_it_is_not_taken_for_the_network(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x")
    DeepLabV3Plus("resnet10t", num_classes=3, conv=None).save_pretrained(run)
    with pytest.raises(ValueError, match=r"x holds a run and model.safetensors; move that file away"):
        load_trained(run)
    assert load_trained(run / "checkpoints").step == 7


def test_a_folder_of_save_pretrained_is_read(tmp_path: Path) -> None:
    net = DeepLabV3Plus("resnet10t", num_classes=3, conv=None)
    net.save_pretrained(tmp_path / "m")
    trained = load_trained(tmp_path / "m")
    same(net, trained.net)
    assert trained.classes == ("class 0", "class 1", "class 2")
    assert not trained.net.training


def test_names_are_words_on_the_card_and_nothing_else(run: Path) -> None:
    names = ("<script>alert(1)</script>", "a|b", "[x](http://evil)", "*_`~$", "&lt;", "two\n# lines", "\\*")
    trained = dataclasses.replace(load_trained(run), classes=names, dataset="<img src=x>\n\n# set")
    text = card(trained)
    assert "<" not in text
    assert "# lines" not in text.splitlines()
    assert "# set" not in text.splitlines()
    (line,) = (line for line in text.splitlines() if line.startswith("DeepLabv3+"))
    read = html.unescape(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", line))  # as a reader of Markdown does
    assert all(" ".join(name.split()) in read for name in (*names, trained.dataset))
    assert not re.search(r"(?<!\\)(\\\\)*[*_`|\[\]~$]", line)


SCORES = Scores(
    50.125, 60.0, 55.0, dict.fromkeys(scenes().classes, 50.0), "rooms", "val", Protocol((0.75, 1.0), True), 7
)


def test_the_card_is_read_back(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x")
    scores = dataclasses.replace(SCORES, stress={"depth is gone": 20.0})
    (run / "results.json").write_text(json.dumps(scores.to_dict()))
    command = ["push", str(run), str(tmp_path / "net"), "--license", "apache-2.0", "--base_model", "timm/resnet10t"]
    assert cli.main(command) == 0
    read = huggingface_hub.ModelCard.load(tmp_path / "net" / "README.md")
    data: Any = read.data
    assert (data.license, data.base_model, data.library_name) == ("apache-2.0", "timm/resnet10t", "malleable")
    assert (data.datasets, data.model_name) == ([scenes().name], "net")
    found = {result.metric_type: result for result in data.eval_results}
    assert {kind: result.metric_value for kind, result in found.items()} == {
        "mean_iou": 50.125,
        "accuracy": 60.0,
        "mean_accuracy": 55.0,
    }
    first = found["mean_iou"]
    assert (first.dataset_name, first.dataset_split) == ("rooms", "val")
    assert first.metric_name == "mIoU in percent, multi-scale 0.75, 1 + flip"
    assert first.metric_args == {"scales": [0.75, 1.0], "flip": True}
    assert "## Limits" in read.text
    assert "| depth is gone | 20.00 |" in read.text


def test_a_card_without_scores_says_so(run: Path) -> None:
    read = huggingface_hub.ModelCard(card(load_trained(run)))
    assert read.data.eval_results is None  # type: ignore[attr-defined]
    assert "Its scores were not measured." in read.text
    assert "other faults of depth was not measured" in read.text


def test_the_hub_is_reached_only_by_its_own_address(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("nobody asked for an upload"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["push", str(run), "models/x"]) == 0
    assert sorted(path.name for path in (tmp_path / "models" / "x").iterdir()) == FILES
    assert cli.main(["pull", "someone/net", "out"]) == 1
    assert "a repository on the hub is written hf://owner/name" in capsys.readouterr().err


class Hub:
    """A hub in a folder: keeps what is uploaded."""

    def __init__(self, root: Path) -> None:
        self.root, self.private = root, False

    def repo_exists(self, repo_id: str) -> bool:
        return (self.root / repo_id).exists()

    def repo_info(self, repo_id: str) -> Any:
        files = [SimpleNamespace(rfilename=path.name) for path in (self.root / repo_id).iterdir()]
        return SimpleNamespace(private=self.private, siblings=files)

    def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> Any:
        self.private = private
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, repo_id: str, folder_path: str, allow_patterns: list[str], **_: Any) -> str:
        assert sorted(allow_patterns) == FILES
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)
        return f"commit of {repo_id}"

    def snapshot_download(self, repo_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert sorted(allow_patterns) == FILES
        return str(self.root / repo_id)


def test_a_hub_that_is_not_reached_is_a_sentence(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Unreached:
        def repo_exists(self, *_: Any, **__: Any) -> None:
            raise Exception("Name or service not known")  # of any kind

    monkeypatch.setattr(huggingface_hub, "HfApi", Unreached)
    assert cli.main(["push", str(run), "hf://someone/net"]) == 1
    assert "hf://someone/net could not be written: Name or service not known. The hub must" in capsys.readouterr().err
    assert cli.main(["push", str(run), "hf://someone"]) == 1
    assert "target must be a folder or hf://OWNER/NAME, got 'hf://someone'" in capsys.readouterr().err


def test_the_card_of_a_network_of_one_s_own_says_what_it_needs(run: Path) -> None:
    trained = load_trained(run)
    assert "--trust" not in card(trained)
    trained.net.settings["network"] = "my_network:build"
    text = card(trained)
    assert "--out labelled --trust" in text
    assert r"It is built by my\_network:build, whose code you need" in text


def test_the_hub_and_back(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    assert cli.main(["push", str(run), "hf://someone/net", "--private"]) == 0
    assert hub.private
    assert sorted(path.name for path in (hub.root / "someone" / "net").iterdir()) == FILES
    assert cli.main(["pull", "hf://someone/net", str(tmp_path / "pulled")]) == 0
    same(load_trained(run).net, load_trained(tmp_path / "pulled").net)


def test_what_is_on_the_hub_is_not_replaced_unasked(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    assert cli.main(["push", str(run), "hf://someone/net"]) == 0
    card = hub.root / "someone" / "net" / "README.md"
    card.write_text("edited by hand")
    assert cli.main(["push", str(run), "hf://someone/net"]) == 1
    assert "hf://someone/net holds README.md, config.json, model.safetensors and is left" in capsys.readouterr().err
    assert cli.main(["push", str(run), "hf://someone/net", "--private", "--overwrite"]) == 1
    assert "hf://someone/net is there and public" in capsys.readouterr().err
    assert card.read_text() == "edited by hand"
    assert cli.main(["push", str(run), "hf://someone/net", "--overwrite"]) == 0
    assert card.read_text() != "edited by hand"


def test_nothing_of_another_network_stays(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["push", str(run), str(tmp_path / "net")]) == 0
    (tmp_path / "net" / "README.md").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("card of another network")
    assert cli.main(["pull", str(tmp_path / "net"), str(tmp_path / "out"), "--overwrite"]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert cli.main(["pull", str(tmp_path / "net"), str(tmp_path / "other"), "--revision", "x"]) == 1
    assert "revision is of a repository on the hub" in capsys.readouterr().err


def test_a_repository_of_pickles_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hub" / "a" / "b").mkdir(parents=True)
    torch.save({}, tmp_path / "hub" / "a" / "b" / "pytorch_model.bin")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(tmp_path / "hub").snapshot_download)
    assert cli.main(["pull", "hf://a/b", str(tmp_path / "out")]) == 1
    assert "could run code" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_silently(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert cli.main(["push", str(run), str(tmp_path)]) == 1
    assert "holds README.md and is left as it is" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"
    assert cli.main(["push", str(run), str(tmp_path), "--overwrite"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


def test_folders_beside_the_target_are_left_alone(run: Path, tmp_path: Path) -> None:
    mine = tmp_path / "model.partial" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert cli.main(["push", str(run), str(tmp_path / "model")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.partial"]
    assert mine.read_text() == "mine"


def test_the_folder_one_is_in_may_be_the_target(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["push", str(run), "."]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_text(json.dumps({"colour": "red"})), "colour"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"junk"), "does not hold a network"),
    ],
    ids=["no config", "broken config", "foreign config", "junk weights"],
)
def test_broken_folders_are_named(
    spoil: Any, words: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared"
    assert cli.main(["push", str(run), str(shared)]) == 0
    spoil(shared)
    assert cli.main(["pull", str(shared), str(tmp_path / "out")]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
