from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from malleable.commands import bench
from malleable.geometry import Geometry
from malleable.layers import Conv25d, MalleableConv2d


def test_numbers_are_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LAYERS", [bench.Shape("tiny", 8, 16, 1, 1, 4)])
    bench.bench(tmp_path / "out.json", rounds=1, only=("layers",))
    results = json.loads((tmp_path / "out.json").read_text())
    assert [row["batch"] for row in results["layers"]] == [1, 4]
    row = results["layers"][0]
    assert row["forward ratio"] == pytest.approx(row["forward ms"] / row["limit forward ms"], rel=0.2)
    assert results["environment"]["torch"] == torch.__version__


def test_times_on_a_gpu_are_those_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            happened.append(f"event on {stream}")

        def synchronize(self) -> None:
            happened.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 0.25 if end is not self else 0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{device}'s stream")
    monkeypatch.setattr(bench, "clear_caches", lambda device: happened.append(f"clear {device}"))
    assert bench.seconds(lambda: happened.append("call"), torch.device("cuda:1")) == pytest.approx(0.25e-3)
    assert happened == ["clear cuda:1", "event on cuda:1's stream", "call", "event on cuda:1's stream", "wait"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="and torch must find it, got 'cuda'"):
        bench.bench(device="cuda")


def test_a_file_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("mine")
    with pytest.raises(FileExistsError, match=r"mine\.json exists and is left as it is"):
        bench.bench(tmp_path / "mine.json")
    assert (tmp_path / "mine.json").read_text() == "mine"


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        bench.bench(rounds=0)


def test_the_scene_puts_every_pixel_in_one_kernel() -> None:
    layer = Conv25d(1, 1, 3, padding=1)
    depth = bench.one_cell_depth(1, 64, reach=1.5 * 4)
    assign = layer.assign(Geometry(depth, bench.FOCAL), (16, 16))
    assert (assign.sum(1) == 1).float().mean() > 0.99
    assert (assign.mean((0, 2, 3, 4)) > 0.1).all()


def test_the_unfold_form_computes_the_same() -> None:
    """Otherwise comparing with it would mean nothing."""
    layer = MalleableConv2d(4, 6, 3, padding=1, bias=False)
    x, geometry = torch.randn(2, 4, 8, 9), Geometry(bench.one_cell_depth(2, 9, 1.5)[..., :8, :], bench.FOCAL)
    y = bench.unfold_form(x, layer.weight, layer.assign(geometry, (8, 9)))
    torch.testing.assert_close(y, layer(x, geometry), rtol=1e-4, atol=1e-5)
