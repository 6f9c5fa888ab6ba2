"""The report as a browser shows it, 390 pixels wide. Skipped where there is no Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers.outcomes import write_outcome
from malleable.reports.report import write_report
from malleable.runs.config import ModelConfig

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"]  # fmt: skip

# A frame is exactly as wide as asked for, a headless window is not. The page itself stays as it is, policy included.
FRAME = """<!doctype html><iframe style="width:390px;height:844px;border:0" srcdoc="{page}"></iframe><pre></pre><script>
onload = () => {{
  const view = document.querySelector("iframe").contentWindow, page = view.document;
  page.querySelectorAll("details").forEach(part => part.open = true);
  document.querySelector("pre").textContent = JSON.stringify({{
    width: view.innerWidth,
    scrolls: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    images: page.images.length,
    broken: [...page.images].filter(image => !image.complete || !image.naturalWidth).map(image => image.alt),
  }});
}};
</script>"""


class Seen(NamedTuple):
    page: dict[str, Any]
    console: list[str]


def look(page: str, folder: Path) -> Seen:
    file = folder / "frame.html"
    file.write_text(FRAME.format(page=escape(page)))
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = re.search(r"<pre>({.*?})</pre>", done.stdout)
    assert found, done.stderr
    return Seen(json.loads(found[1]), [line for line in done.stderr.splitlines() if "CONSOLE" in line])


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("report")
    classes = [f"class_with_a_rather_long_name_{number}" for number in range(40)]
    models = [None, *(ModelConfig("resnet10t", conv=conv, kernels=1, pretrained=False)
                      for conv in ("depth_aware", "conv25d", "malleable"))]  # fmt: skip
    runs = [
        [write_outcome(folder / f"{number}{seed}", model, validated=40.0 + seed, classes=classes, seed=seed, root="nyu")
         for seed in range(2)]
        for number, model in enumerate(models)
    ]  # fmt: skip
    groups = {f"a_method_with_a_name_that_is_long_and_has_no_spaces_{n}": group for n, group in enumerate(runs)}
    write_report(groups, folder / "r.html", "Report")
    return look((folder / "r.html").read_text(), folder)


def test_it_does_not_scroll_sideways(seen: Seen) -> None:
    assert seen.page["width"] == 390
    assert seen.page["scrolls"] == 0


def test_every_image_is_shown(seen: Seen) -> None:
    assert seen.page["images"] > 0
    assert seen.page["broken"] == []


def test_the_console_stays_empty(seen: Seen) -> None:
    assert seen.console == []


def test_a_bad_page_would_be_found(tmp_path: Path) -> None:
    policy = """<meta http-equiv="Content-Security-Policy" content="img-src data:">"""
    bad = '<div style="width:600px">wide</div><img alt="far" src="http://localhost:1/x.png">'
    seen = look(f"<!doctype html>{policy}{bad}", tmp_path)
    assert seen.page["width"] == 390
    assert seen.page["scrolls"] > 200
    assert seen.page["broken"] == ["far"]
    assert any("Content Security Policy" in line for line in seen.console)
