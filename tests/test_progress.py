"""How far work has come, where there is no terminal."""

import threading
import time

import pytest

from malleable import progress as parallel


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "EVERY", 0.02)


def test_work_that_takes_long_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    for number in parallel.with_progress(range(2), 2, "reading"):
        until = time.monotonic() + 30
        while f"reading: {number}/2, 0:00:0" not in "".join(lines) and time.monotonic() < until:
            time.sleep(0.01)
            lines.append(capsys.readouterr().err)
    assert "reading: 1/2, 0:00:0" in "".join(lines)
    assert capsys.readouterr().err.endswith("reading: 2/2\n")


def test_work_without_parts_says_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with parallel.showing("model.onnx"):
        time.sleep(0.1)
    assert "model.onnx: 0:00:00\n" in capsys.readouterr().err


def test_quick_work_says_only_that_it_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "EVERY", 60)
    assert list(parallel.with_progress("ab", 2, "reading")) == ["a", "b"]
    assert capsys.readouterr().err == "reading: 2/2\n"


def test_work_that_fails_says_nothing_more(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "EVERY", 60)
    with pytest.raises(ValueError, match="broken"), parallel.showing("reading", 2):
        raise ValueError("broken")
    assert capsys.readouterr().err == ""


def test_progress_that_is_left_early_ends_what_it_shows() -> None:
    """Also while somebody keeps what makes the results, as the frames of a traceback do."""
    before = threading.active_count()
    results = parallel.parallel_map(str, range(9), workers=2)
    shown = parallel.with_progress(results, 9, "reading")
    assert next(shown) == "0"
    assert threading.active_count() > before
    shown.close()
    assert threading.active_count() == before
