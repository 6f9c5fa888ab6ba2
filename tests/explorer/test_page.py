"""The page: its controls by themselves, and all of it in a browser."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

from helpers.files import save
from helpers.toys import MODEL, scenes, write_run

gr = pytest.importorskip("gradio")

from malleable.explorer.explorer import Explorer, Source  # noqa: E402
from malleable.explorer.layer import MOST_KERNELS, Layer  # noqa: E402
from malleable.explorer.page import build, controls_of, fault_of, layer_of  # noqa: E402
from malleable.explorer.scenes import Fault, items_of  # noqa: E402
from malleable.explorer.server import served  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"
VIEWS = "#views [data-drawn], #views[data-drawn]"


def test_a_port_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ValueError, match="port must lie between 1 and 65535, got 99999"):
        served(None, port=99999).__enter__()  # type: ignore[arg-type]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 cannot be used"):
            served(None, port=port).__enter__()  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])  # no machine has these
def test_a_host_that_is_not_this_machine_is_named(host: str) -> None:
    with pytest.raises(ValueError, match=f"host {host} cannot be used"):
        served(None, host).__enter__()  # type: ignore[arg-type]


def test_the_page_is_served_at_an_address_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    data = scenes()
    with served(Explorer({"rooms": Source(items_of(data), data.classes)}, {}, {}), "::1") as address:
        assert address.startswith("http://[::1]:")
        with urlopen(address) as answer:
            assert answer.status == 200


def values(controls: list[Any]) -> list[Any]:
    """What the page would hand back."""
    return [control.value if isinstance(control, gr.Slider) else control for control in controls]


@pytest.mark.parametrize(
    "layer",
    [
        Layer(centers=(-2.0, -1.0, 0.0, 1.0, 2.0)),
        Layer(kernels=1, taps=7, centers=(-1.5, 0.2, 1.1), temperature=0.25, scales=(1.0,), invalid="ignore"),
        Layer(kernels=2, rate=64, centers=(-9.0, -0.5, 0.5, 8.0), temperature=11.0, scales=(0.3, 0.7)),
        Layer("conv25d", kernels=4, dilation=24, fill_depth=True, smooth_depth=2),
        Layer("depth_aware", kernels=1, alpha=40.0),
        Layer(centers=(-2.0, -1.0, 0.0, 1.0, 2.0), temperature=3e-5),
    ],
    ids=str,
)
def test_controls_hold_a_layer_whatever_it_is(layer: Layer) -> None:
    controls = controls_of(layer)
    assert layer_of(values(controls)) == layer
    for slider in (control for control in controls if isinstance(control, gr.Slider) and control.value is not None):
        assert slider.minimum <= slider.value <= slider.maximum


def test_a_layer_begins_with_the_centers_of_the_paper() -> None:
    shown = [control for control in controls_of(Layer(kernels=2))[11:] if control.visible]
    assert [slider.value for slider in shown] == [-1.5, -0.5, 0.5, 1.5]
    assert [slider.label for slider in shown] == ["border behind", "center 1", "center 2", "border in front"]
    assert len(controls_of(Layer(kernels=2))) == 11 + MOST_KERNELS + 2


def test_faults_are_read_in_percent() -> None:
    assert fault_of([2.0, 0.5, 5.0, 3.0, 25.0]) == Fault(2.0, 0.5, 0.05, 3, 0.25)


def test_every_control_of_a_layer_is_listened_to() -> None:
    data = scenes()
    page = build(Explorer({"rooms": Source(items_of(data), data.classes)}, {}, {"one": Layer()}))
    controls = {block.label: number for number, block in page.blocks.items() if getattr(block, "label", None)}
    heard = {number for listener in page.fns.values() for number, event in listener.targets if event == "input"}
    layer = {"convolution", "kernels K", "temperature", "α per metre", "taps of a side", "dilation", "rate of its map"}
    before = {"unknown depth is filled before", "medians that depth passes before"}
    for label in layer | before | {"without depth a neighbour counts as"}:
        assert controls[label] in heard, label


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A page with two networks of the user's own, as the command line opens it, without a word to anybody."""
    folder = tmp_path_factory.mktemp("explore")
    runs = [
        write_run(folder / "ours"),
        write_run(folder / "rgb", model=type(MODEL)("resnet10t", None, pretrained=False)),
    ]
    command = [sys.executable, "-m", "malleable", "explore", *map(str, runs), "--browser", "false", "--data", "rooms"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().split()[4].rstrip(";")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0


@pytest.fixture
def page(address: str) -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    said: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        opened = browser.new_page(viewport={"width": 1300, "height": 900})
        opened.on("console", lambda message: said.append(message.text))
        opened.on("pageerror", lambda error: said.append(str(error)))
        opened.on("request", lambda request: request.url.startswith((address, "data:")) or said.append(request.url))
        opened.goto(address)
        opened.wait_for_selector(VIEWS, timeout=60_000)
        yield opened
        browser.close()
    said = [words for words in said if words != "Method not implemented."]  # Gradio's own, for every file
    assert said == []  # nor was anything asked for elsewhere


def drawn(page: Any) -> str:
    return str(page.locator(VIEWS).get_attribute("data-drawn"))


def wait_for_another(page: Any, before: str) -> None:
    page.wait_for_function(
        "([views, before]) => document.querySelector(views).dataset.drawn !== before", arg=[VIEWS, before]
    )


def picture(page: Any) -> bytes:
    return bytes(page.locator("#views").screenshot())


def move(page: Any, label: str, value: float) -> None:
    before = drawn(page)
    number = page.get_by_label(f"number input for {label}", exact=True)
    number.fill(str(value))
    number.press("Tab")
    wait_for_another(page, before)


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@pytest.mark.slow
@needs_browser
def test_a_click_shows_another_pixel(page: Any) -> None:
    before, seen = drawn(page), picture(page)
    page.locator("#views .whole svg").click(position={"x": 100, "y": 60})
    wait_for_another(page, before)
    width = page.locator("#views .whole svg").bounding_box()["width"]
    x, y = 100 * 160 / width, 60 * 160 / width
    said = page.locator("#views .said").inner_text()
    column, row = map(int, said[said.index("(") + 1 : said.index(")")].split(", "))
    assert abs(column - x) <= 3
    assert abs(row - y) <= 3
    assert picture(page) != seen


@pytest.mark.slow
@needs_browser
def test_arrow_keys_move_the_pixel(page: Any) -> None:
    before, said = drawn(page), page.locator("#views .said").inner_text()
    page.locator("#views .whole svg").press("ArrowLeft")
    wait_for_another(page, before)
    assert page.locator("#views .said").inner_text() != said


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    ("label", "value"),
    [("temperature", 3), ("center 1", 0.7), ("kernels K", 2), ("focal length, pixels", 60), ("dilation", 4)],
)
def test_a_slider_changes_the_picture(page: Any, label: str, value: float) -> None:
    seen = picture(page)
    move(page, label, value)
    assert picture(page) != seen


@pytest.mark.slow
@needs_browser
def test_the_cloud_turns(page: Any) -> None:
    cloud = page.locator("#views canvas")
    seen, box = cloud.screenshot(), cloud.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 180, box["y"] + 90, steps=4)
    page.mouse.up()
    page.wait_for_timeout(200)
    assert cloud.screenshot() != seen


@pytest.mark.slow
@needs_browser
def test_networks_are_shown_beside_each_other_and_no_depth_is_felt(page: Any) -> None:
    captions = page.locator("#labels figcaption")
    captions.first.wait_for(timeout=60_000)
    titles = [text.partition(" ")[0] for text in captions.all_inner_texts()]
    assert titles == ["the", "ours", "ours,", "rgb"]
    move(page, "unknown, %", 100)
    assert "has no depth" in page.locator("#views .said").inner_text()
    page.get_by_text("changed by what is wrong with depth").first.wait_for(timeout=60_000)


@pytest.mark.slow
@needs_browser
def test_a_broken_file_gets_a_sentence_and_a_good_one_is_shown(page: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno image")
    save(np.full((48, 64, 3), 120, np.uint8), tmp_path / "photo.png")
    save(np.full((48, 64), 1500, np.uint16), tmp_path / "deep.png")
    page.get_by_text("Your own image").click()
    page.locator("#image-file input[type=file]").set_input_files(str(tmp_path / "broken.png"))
    page.get_by_text("broken", exact=False).first.wait_for()
    page.get_by_role("button", name="Show it").click()
    page.locator("#wrong [role=alert]").wait_for()
    assert page.locator("#wrong").inner_text().startswith("broken.png cannot be read as an image")
    page.locator("#image-file").get_by_label("Clear").click()
    page.locator("#image-file input[type=file]").set_input_files(str(tmp_path / "photo.png"))
    page.locator("#depth-file input[type=file]").set_input_files(str(tmp_path / "deep.png"))
    page.get_by_text("deep", exact=False).first.wait_for()
    page.get_by_label("focal length, pixels").first.fill("60")
    before = drawn(page)
    page.get_by_role("button", name="Show it").click()
    wait_for_another(page, before)
    assert "lies at 1.50 m" in page.locator("#views .said").inner_text()
    assert page.locator("#wrong").inner_text() == ""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1300, 390])
def test_nothing_sticks_out(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") == width
