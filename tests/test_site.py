"""The site builds strictly, and a browser shows every page of it, wide and narrow, without a word of complaint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = "--no-first-run --disable-background-networking --disable-component-update --disable-sync --disable-quic"

# Every page in turn in a frame as wide as a desktop's window and as a phone's; what sticks out is reported.
VISITOR = """<!doctype html><link rel="icon" href="data:,"><iframe height="900"></iframe><script>
const frame = document.querySelector("iframe");
const visit = (page, width) => new Promise(done => {
  frame.onload = () => setTimeout(() => {
    const wide = frame.contentDocument.documentElement.scrollWidth;
    done(wide > width ? [`${page} is ${wide} wide in ${width}`] : []);
  }, 100);
  frame.width = width; frame.src = page;
});
(async () => {
  const found = [];
  for (const page of PAGES) for (const width of [1280, 390]) found.push(...await visit(page, width));
  await fetch("/report", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical")
    folder = tmp_path_factory.mktemp("site")
    for name in ("src", "docs", "studies", "tests", "configs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "logs"))
    for path in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "CITATION.cff", ROOT / "LICENSE"):
        shutil.copy(path, folder)
    for command in (["docs/site.py"], ["-m", "zensical", "build", "--strict", "--clean"]):
        made = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stdout + made.stderr
    return folder / "site"


class Server(ThreadingHTTPServer):
    """Shows a folder on this machine, and keeps the first report that is posted to it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.reports: Queue[list[str]] = Queue()


class Handler(SimpleHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def visit(folder: Path, profile: Path) -> tuple[list[str], list[str]]:
    """Open ``visitor.html`` of ``folder`` in a browser: what it reports, and what browsers write in the console."""
    flags = [*QUIET.split(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    flags += ["--window-size=1400,1000", "--enable-logging=stderr"]
    with Server(folder) as server, (profile.parent / "log").open("w+") as log:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [str(CHROMIUM), *flags, f"http://127.0.0.1:{server.server_port}/visitor.html"]
        browser = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            report = server.reports.get(timeout=120)
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            server.shutdown()
        log.seek(0)
        return report, [line for line in log if "CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_every_page_opens_wide_and_narrow_without_a_message(site: Path, tmp_path: Path) -> None:
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    assert len(pages) > 20
    (site / "visitor.html").write_text(VISITOR.replace("PAGES", json.dumps(pages)))
    assert visit(site, tmp_path / "profile") == ([], [])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_what_sticks_out_or_complains_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    page = "<!doctype html><div style='width:800px'>x</div><script>console.log('oh')</script>"
    (folder / "bad.html").write_text(page)
    (folder / "visitor.html").write_text(VISITOR.replace("PAGES", '["bad.html"]'))
    report, console = visit(folder, tmp_path / "profile")
    assert report == ["bad.html is 808 wide in 390"]
    assert len([line for line in console if "oh" in line]) == 2


@pytest.mark.slow
def test_search_knows_guides_and_reference(site: Path) -> None:
    index = (site / "search.json").read_text()
    for words in ("malleable.MalleableConv2d", "Relative depth", "NYUDv2 at half size"):
        assert words in index, words
