"""What the documents show must run."""

from __future__ import annotations

import doctest
import re
import shlex
import sys
from pathlib import Path

import pytest

import malleable
from malleable import cli, data, functional

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
DOCUMENTS += [*sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("*/*/README.md"))]


def examples(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", examples(ROOT / "README.md"))
def test_the_readmes_examples_run(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {})


PUBLIC = [getattr(module, name) for module in (malleable, functional, data) for name in module.__all__]
SOURCES = sorted({thing.__module__ for thing in PUBLIC if hasattr(thing, "__module__")})
EXAMPLES = [test for name in SOURCES for test in doctest.DocTestFinder().find(sys.modules[name]) if test.examples]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_references_examples_run(example: doctest.DocTest) -> None:
    example.globs = {}
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_reference_shows_how_the_main_things_are_called() -> None:
    shown = {example.name.rpartition(".")[2] for example in EXAMPLES}
    assert {"MalleableConv2d", "Conv25d", "Geometry", "Camera", "convert", "deeplabv3plus", "SyntheticScenes"} <= shown


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_name_what_exists(document: Path) -> None:
    """Examples in the docs may need files or a network, so they are read, not run."""
    for block in examples(document):
        compile(block, str(document), "exec")
        exec("\n".join(re.findall(r"^(?:from|import) malleable.*$", block, re.MULTILINE)), {})
        for path in re.findall(r"\bmb((?:\.\w+)+)", block):
            thing: object = malleable
            for name in path[1:].split("."):
                thing = getattr(thing, name)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_name_files_that_exist(document: Path) -> None:
    named = re.findall(r"(?:python|malleable study|--config) ((?:\w+/)+\w+\.\w+)", document.read_text())
    for path in set(named) - {"runs/x/config.yaml", "configs/mine.yaml"}:  # the user's own
        assert (ROOT / path).exists(), path


def test_contributors_are_shown_files_that_exist() -> None:
    named = re.findall(r"`([a-z_/]+\.(?:py|toml))`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 20
    for path in named:
        assert (ROOT / path).exists() or (ROOT / "src/malleable" / path).exists(), path


def test_your_network_from_nothing_to_a_shared_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is copied block by block, as its reader would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_network", raising=False)
    page = (ROOT / "docs" / "your-network.md").read_text()
    names: dict[str, object] = {}
    for kind, block in re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL):
        if kind == "python":
            exec(compile(block, "your-network.md", "exec"), names)
        elif kind == "sh":
            for line in block.splitlines():
                assert cli.main(shlex.split(line, comments=True)[1:]) == 0, line
        else:
            first, _, content = block.partition("\n")
            Path(first.removeprefix("# ")).write_text(content)
    assert sorted(path.name for path in Path("shared").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert Path("labelled/overlay/photo.png").is_file()
