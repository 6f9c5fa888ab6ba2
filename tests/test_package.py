"""What the package shows of itself, and what is shipped with it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import malleable

ROOT = Path(__file__).parents[1]


def test_dir_names_what_is_imported_on_first_use() -> None:
    script = (
        "import sys, malleable as mb\n"
        "assert {'__file__', *mb.__all__} <= set(dir(mb)), set(mb.__all__) - set(dir(mb))\n"
        "assert 'malleable.data' not in sys.modules and 'torchvision' not in sys.modules\n"
        "assert mb.data.SyntheticScenes"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert not finished.stderr


def test_the_compiler_is_loaded_only_to_compile() -> None:
    script = "import sys, malleable.cli\nassert 'torch._dynamo' not in sys.modules"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert not finished.stderr


def test_the_version_is_written_once_and_its_changes_are_listed() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^path = "src/malleable/__init__.py"$', project, re.MULTILINE)
    assert not re.search(r"^version = ", project, re.MULTILINE)
    newest = re.search(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == malleable.__version__


def test_the_source_distribution_has_all_that_make_lint_looks_at() -> None:
    """The Makefile and its folders are shipped together, so its commands work there too."""
    (shipped,) = re.findall(
        r"tool\.hatch\.build\.targets\.sdist]\ninclude = \[(.*?)]", (ROOT / "pyproject.toml").read_text()
    )
    (linted,) = re.findall(r"ruff check (.*)", (ROOT / "Makefile").read_text())
    assert {*linted.split(), ".github"} <= set(re.findall(r'"(.*?)"', shipped))
