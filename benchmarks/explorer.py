"""How soon the explorer's picture follows its sliders: the table of docs/explore.md.

    pip install playwright                     # and Chromium
    python benchmarks/explorer.py [ARGUMENTS OF malleable explore]

Every slider is moved with the arrow keys, step by step. Measured in the browser, from the event of the move until the
frame with the changed picture is on the screen.
"""

from __future__ import annotations

import shutil
import signal
import statistics
import subprocess
import sys
from typing import Any

from playwright.sync_api import sync_playwright

SLIDERS = ("center 1", "temperature", "kernels K", "focal length, pixels", "dilation")
MOVES, WARMUP = 24, 4
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WATCH = """() => {
  const views = document.querySelector("#views [data-drawn], #views[data-drawn]");
  let moved = 0;
  window.took = [];
  document.addEventListener("input", event => moved = event.timeStamp, true);
  new MutationObserver(() => requestAnimationFrame(() => setTimeout(() => window.took.push(performance.now() - moved))))
    .observe(views, { attributeFilter: ["data-drawn"] });
}"""


def measure(page: Any, label: str) -> list[float]:
    """Move a slider to and fro, and wait for each picture: milliseconds of each move."""
    slider = page.get_by_label(f"range slider for {label}", exact=True)
    slider.focus()
    page.evaluate("window.took = []")
    for done in range(WARMUP + MOVES):
        page.keyboard.press("ArrowRight" if done % 4 < 2 else "ArrowLeft")
        page.wait_for_function("done => window.took.length > done", arg=done)
    return list(page.evaluate("window.took"))[WARMUP:]


def main() -> None:
    command = [sys.executable, "-m", "malleable", "explore", "--browser", "false", *sys.argv[1:]]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().split()[4].rstrip(";")
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1300, "height": 900})
            page.goto(address)
            page.wait_for_selector("#views [data-drawn], #views[data-drawn]", timeout=60_000)
            page.wait_for_timeout(1000)
            page.evaluate(WATCH)
            print("| slider | median, ms | slowest of", MOVES, "|\n|---|---|---|")
            for label in SLIDERS:
                took = measure(page, label)
                print(f"| {label} | {statistics.median(took):.0f} | {max(took):.0f} |", flush=True)
            browser.close()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)


if __name__ == "__main__":
    main()
