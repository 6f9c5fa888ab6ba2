"""The notebooks run from top to bottom, and their two forms say the same."""

from __future__ import annotations

import json
import re
import runpy
import tempfile
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = [*sorted(FOLDER.glob("*.py")), FOLDER.parent / "teacher_and_student.py"]
LONG = {"your_own_folder"}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in LONG else []) for path in NOTEBOOKS],
)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    matplotlib.use("agg")
    runpy.run_path(str(path), run_name="__main__")
    pyplot.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_is_that_of_the_script(path: Path) -> None:
    cells = re.split(r"^# %%(.*)\n", path.read_text(), flags=re.MULTILINE)[1:]
    code = [body.strip() for kind, body in zip(cells[::2], cells[1::2], strict=True) if not kind]
    notebook = json.loads((FOLDER / f"{path.stem}.ipynb").read_text())
    assert ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"] == code
