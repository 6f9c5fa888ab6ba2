"""``malleable explore`` as it is called; tests/explorer has what the page does."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest

from helpers.toys import write_run
from malleable import cli
from malleable.commands import explore as command


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would be served, and to whom."""
    from malleable.explorer import server

    found: dict[str, Any] = {}

    def served(explorer: object, host: str, port: int | None) -> None:
        found.update(explorer=explorer, host=host, port=port)
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "served", served)
    monkeypatch.setattr(command, "version", lambda _: "6.31.0")
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    return found


def test_without_anything_there_are_scenes_for_this_machine_alone(shown: dict[str, Any]) -> None:
    assert cli.main(["explore"]) == 0
    assert list(shown["explorer"].sources) == ["synthetic-rooms", "synthetic-streets"]
    assert (shown["host"], shown["port"], shown["explorer"].networks) == ("127.0.0.1", None, {})


def test_runs_are_named_without_a_flag(shown: dict[str, Any], tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / name)) for name in ("x", "y")]
    assert cli.main(["explore", *runs, "--data", "rooms", "--device", "cpu"]) == 0
    assert list(shown["explorer"].networks) == ["x", "y"]
    assert next(iter(shown["explorer"].layers)).startswith("x: res3")
    assert shown["explorer"].sources["synthetic-rooms"].items[0].load().camera.size == (120, 160)


def test_links_keep_their_names_and_a_run_given_twice_is_one(shown: dict[str, Any], tmp_path: Path) -> None:
    run = write_run(tmp_path / "exp_17")
    (tmp_path / "best").symlink_to(run, target_is_directory=True)
    named = [str(tmp_path / "best"), str(run), f"{run}/"]
    assert cli.main(["explore", *named, "--data", "rooms", "--device", "cpu"]) == 0
    assert list(shown["explorer"].networks) == ["best", "exp_17"]


def test_data_and_images_go_before_synthetic_scenes(shown: dict[str, Any], folder: Any) -> None:
    root = folder()
    photo = str(root / "images" / "a.png")
    assert cli.main(["explore", "--data", str(root), "--split", "train", "--image", photo, "--focal", "20"]) == 0
    assert list(shown["explorer"].sources)[:2] == ["a.png", "tiny"]
    assert shown["explorer"].sources["a.png"].items[0].load().camera.fx == 20
    assert [item.id for item in shown["explorer"].sources["tiny"].items] == ["a", "b"]


def test_what_the_network_learned_from_may_be_gone(
    shown: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "x", root=tmp_path / "gone")
    assert cli.main(["explore", str(run), "--device", "cpu"]) == 0
    assert "note: what the network was trained on cannot be shown" in capsys.readouterr().err
    assert list(shown["explorer"].sources) == ["synthetic-rooms", "synthetic-streets"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--focal", "5"], "depth, unit, camera and focal are those of --image FILE"),
        (["--split", "val"], "split is that of a data set; add --data FOLDER"),
    ],
)
def test_wrong_calls_are_answered(
    shown: dict[str, Any], words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explore", *words]) == 1
    assert sentence in capsys.readouterr().err


def test_without_gradio_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(command, "version", absent)
    assert cli.main(["explore"]) == 1
    assert "Gradio 6.31 or newer, and none is installed; pip install" in capsys.readouterr().err


@pytest.mark.parametrize("old", ["4.44.1", "6.9", "6.30.0rc1", "5"])
def test_an_old_gradio_is_told_which_it_must_be(
    old: str, shown: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "version", lambda _: old)
    assert cli.main(["explore"]) == 1
    needed = next(word for word in requires("malleable") or [] if "extra == 'explore'" in word).partition(";")[0]
    said = f'{old} is installed; pip install "{needed}", or pip install ".[explore]" in a clone'
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("new", ["6.31", "6.100.0", "7.0rc1"])
def test_a_newer_gradio_will_do(new: str, shown: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "version", lambda _: new)
    assert cli.main(["explore"]) == 0
