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


def test_the_version_is_the_project_s() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert malleable.__version__ == version


def test_sources_that_are_not_installed_have_a_version_too() -> None:
    script = (
        "from importlib import metadata\n"
        "installed = metadata.distribution\n"
        "def without(name):\n"
        "    if name == 'malleable':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return installed(name)\n"
        "metadata.distribution = without\n"
        "import malleable\n"
        "print(malleable.__version__)"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (finished.stdout, finished.stderr) == ("0+sources\n", "")


def test_the_source_distribution_has_all_that_make_lint_looks_at() -> None:
    """The Makefile and its folders are shipped together, so its commands work there too."""
    (shipped,) = re.findall(
        r"tool\.hatch\.build\.targets\.sdist]\ninclude = \[(.*?)]", (ROOT / "pyproject.toml").read_text()
    )
    (linted,) = re.findall(r"ruff check (.*)", (ROOT / "Makefile").read_text())
    assert set(linted.split()) <= set(re.findall(r'"(.*?)"', shipped))
