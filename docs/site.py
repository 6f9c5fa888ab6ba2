"""Gathers the site's pages in ``build/pages``, from which ``make docs`` makes HTML.

The repository's Markdown is copied as it is, in the folders it has here, with the files and pictures that it links to,
so a link means the same on GitHub and on the site. The reference has a page for each public module, from docstrings.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import malleable
from malleable import data, functional

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
START = "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/*.md", "*/*/README.md"
REFERENCE = {"malleable": malleable, "functional": functional, "data": data}


def linked(document: Path) -> set[Path]:
    """Find the files of the repository that ``document`` links to; fail if one is not there."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()) if document.suffix == ".md" else []
    paths = {(document.parent / target).resolve() for target in targets if "://" not in target}
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{document.relative_to(ROOT)} links to {path.relative_to(ROOT)}, which is no file")
    return paths


def gather() -> set[Path]:
    """Find all pages and, from page to page, what they link to."""
    found: set[Path] = set()
    left = {path for pattern in START for path in ROOT.glob(pattern)}
    while left:
        path = left.pop()
        found.add(path)
        left |= linked(path) - found
    return found


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    for path in gather():
        name = path.relative_to(ROOT)
        copy = PAGES / ("index.md" if name == Path("README.md") else name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (PAGES / "api").mkdir()
    for page, module in REFERENCE.items():
        names = [name for name in module.__all__ if name not in REFERENCE and name != "cost"]
        body = "\n\n".join(f"::: {module.__name__}.{name}" for name in names)
        (PAGES / "api" / f"{page}.md").write_text(f"# {module.__name__}\n\n{body}\n")


if __name__ == "__main__":
    main()
