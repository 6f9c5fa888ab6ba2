"""The page itself: what can be set on it, and what is computed when it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import gradio as gr

from malleable.camera import DEPTH_UNITS
from malleable.data.folder import IMAGE_SUFFIXES
from malleable.explorer.explorer import Explorer, Scene
from malleable.explorer.layer import MOST_KERNELS, Layer
from malleable.explorer.scenes import DEPTH_SUFFIXES, Fault, depth_of, handed_in, picture_of
from malleable.explorer.views import source, view

_ALONE = "a layer alone"
_KINDS = [("malleable", "malleable"), ("2.5D", "conv25d"), ("depth-aware", "depth_aware")]
_HALF = 150  # pixels: two of them in a row
_RANGES = {
    "kernels": (1, MOST_KERNELS),
    "temperature": (0.01, 5),
    "alpha": (0, 20),
    "center": (-6, 6),
    "taps": (3, 9),
    "dilation": (1, 16),
    "rate": (1, 32),
    "smooth_depth": (0, 5),
}
_FAULTS = (
    ("depth ×", 0.1, 10, 1, 0.1),
    ("depth + metres", -2, 5, 0, 0.05),
    ("noise, %", 0, 20, 0, 0.5),
    ("moved, pixels", 0, 32, 0, 1),
    ("unknown, %", 0, 100, 0, 5),
)
_FAST: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last", "queue": False}


@dataclass(frozen=True, eq=False)
class Controls:
    """Holds what can be set of a layer, in the order in which the page hands over their values."""

    start: gr.Dropdown
    conv: gr.Radio
    kernels: gr.Slider
    taps: gr.Slider
    dilation: gr.Slider
    rate: gr.Slider
    temperature: gr.Slider
    alpha: gr.Slider
    invalid: gr.Radio
    fill_depth: gr.Checkbox
    smooth_depth: gr.Slider
    scales: gr.State
    centers: list[gr.Slider]

    @classmethod
    def shown(cls, layers: Sequence[str]) -> Controls:
        """Put them on the page; their values come later."""
        scales = gr.State(())
        with gr.Accordion("Layer"):
            start = gr.Dropdown(list(layers), value=layers[0], label="start from", visible=len(layers) > 1)
            conv = gr.Radio(_KINDS, value="malleable", label="convolution")

            def slider(name: str, label: str = "", step: float = 1, visible: bool = True) -> gr.Slider:
                return gr.Slider(*_RANGES[name], step=step, label=label, visible=visible, min_width=_HALF, buttons=[])

            with gr.Row():
                kernels = slider("kernels", "kernels K")
                temperature = slider("temperature", "temperature", 0.01)
                alpha = slider("alpha", "α per metre", 0.1, False)
                centers = [slider("center", step=0.01, visible=False) for _ in range(MOST_KERNELS + 2)]
            with gr.Row():
                taps = slider("taps", "taps of a side", 2)
                dilation = slider("dilation", "dilation")
                rate = slider("rate", "rate of its map")
            invalid = gr.Radio(["same", "uniform", "ignore"], value="same", label="without depth a neighbour counts as")
            fill_depth = gr.Checkbox(label="unknown depth is filled before")
            smooth_depth = slider("smooth_depth", "medians that depth passes before")
        return cls(
            start, conv, kernels, taps, dilation, rate, temperature, alpha, invalid, fill_depth, smooth_depth, scales,
            centers,
        )  # fmt: skip

    @property
    def all(self) -> list[Any]:
        """List them, but for what they may start from."""
        return [
            self.conv, self.kernels, self.taps, self.dilation, self.rate, self.temperature, self.alpha, self.invalid,
            self.fill_depth, self.smooth_depth, self.scales, *self.centers,
        ]  # fmt: skip


def layer_of(values: Sequence[Any]) -> Layer:
    """Make a layer of the values of ``Controls.all``."""
    conv, kernels, taps, dilation, rate, temperature, alpha, invalid, fill, smooth, scales, *centers = values
    kernels = 1 if conv == "depth_aware" else int(kernels)
    window = (int(taps), int(dilation), int(rate))
    layer = Layer(conv, kernels, *window, alpha=alpha, invalid=invalid, fill_depth=fill, smooth_depth=int(smooth))
    if conv != "malleable":
        return layer
    return replace(layer, temperature=temperature, scales=tuple(scales), centers=tuple(centers[: kernels + 2]))


def controls_of(layer: Layer) -> list[Any]:
    """Give ``Controls.all`` the values of ``layer``, and hide what it does not have."""
    malleable, aware = layer.conv == "malleable", layer.conv == "depth_aware"
    at = layer.centers or tuple(k - (layer.kernels + 1) / 2 for k in range(layer.kernels + 2)) if malleable else ()
    names = ["border behind", *(f"center {k}" for k in range(1, layer.kernels + 1)), "border in front"]
    centers = [_slider("center", value, label=name, visible=True) for value, name in zip(at, names, strict=False)]
    return [
        layer.conv,
        _slider("kernels", layer.kernels, visible=not aware),
        *(_slider(name, getattr(layer, name)) for name in ("taps", "dilation", "rate")),
        _slider("temperature", layer.temperature, visible=malleable),
        _slider("alpha", layer.alpha, visible=aware),
        layer.invalid,
        layer.fill_depth,
        _slider("smooth_depth", layer.smooth_depth),
        layer.scales,
        *centers,
        *[gr.Slider(visible=False)] * (MOST_KERNELS + 2 - len(centers)),
    ]


def _slider(name: str, value: float, **changes: Any) -> gr.Slider:
    """Set a slider to ``value``, which may lie beyond what the slider reaches on its own."""
    value, (low, high) = float(f"{value:.4g}"), _RANGES[name]
    return gr.Slider(value=value, minimum=min(low, value), maximum=max(high, value), **changes)


def fault_of(values: Sequence[Any]) -> Fault:
    """Make a fault of the sliders' values."""
    times, plus, noise, pixels, unknown = values
    return Fault(times, plus, noise / 100, int(pixels), unknown / 100)


def opened(scene: Scene, layer: Layer) -> list[Any]:
    """Show a scene that is new: the scene, its views, its focal length, and nothing wrong with its depth."""
    focal = scene.clean.camera.focal
    picture, depth = json.dumps(picture_of(scene.clean)), json.dumps(depth_of(scene.shown))
    views = gr.HTML(value=drawn(layer, scene), picture=picture, depth=depth)
    low, value, high = (round(factor * focal, 1) for factor in (0.25, 1, 4))
    return [scene, views, gr.Slider(minimum=low, maximum=high, value=value), *(fault[3] for fault in _FAULTS)]


def drawn(layer: Layer, scene: Scene) -> str:
    """Say what is to be drawn; JSON, as Gradio takes its time over objects."""
    return json.dumps(view(layer, scene.shown, scene.pixel))


def looked(scene: Scene, *layer: Any) -> str:
    """Show what another layer sees at the same pixel."""
    return drawn(layer_of(layer), scene)


def clicked(scene: Scene, event: gr.EventData, *layer: Any) -> tuple[Scene, str]:
    """Show another pixel."""
    x, y = event.index
    scene = replace(scene, pixel=(int(x), int(y)))
    return scene, looked(scene, *layer)


def spoilt(scene: Scene, focal: float, *values: Any) -> tuple[Scene, gr.HTML]:
    """Show the scene with other depth or another camera: the sliders' five values, then those of the layer."""
    scene = scene.spoilt(fault_of(values[:5]), focal)
    return scene, gr.HTML(value=looked(scene, *values[5:]), depth=json.dumps(depth_of(scene.shown)))


def refocused(scene: Scene, focal: float, *layer: Any) -> tuple[Scene, str]:
    """Show the scene with another focal length."""
    scene = scene.refocused(focal)
    return scene, looked(scene, *layer)


def undone(scene: Scene, *layer: Any) -> list[Any]:
    """Show depth and camera as they were."""
    return opened(replace(scene, shown=scene.clean), layer_of(layer))


def regrouped(scene: Scene, *values: Any) -> list[Any]:
    """Show another kind of layer or another number of kernels, with the centers that it starts from."""
    layer = replace(layer_of(values), centers=(), scales=())
    return [*controls_of(layer), drawn(layer, scene)]


def build(explorer: Explorer) -> gr.Blocks:
    """Make the page."""
    layers = {**explorer.layers, _ALONE: Layer()}
    names = list(explorer.sources)
    page = gr.Blocks(title="malleable explore", analytics_enabled=False, fill_width=True)
    with page:
        scene = gr.State(None)
        gr.Markdown("## Which neighbours does a convolution take?")
        with gr.Row():
            with gr.Column(scale=5, min_width=320, elem_id="shown"):
                static: dict[str, Any] = {f"{part}_template": source(f"views.{part}") for part in ("html", "css")}
                static |= {"js_on_load": source("views.js"), "apply_default_css": False}
                views = gr.HTML(**static, picture=None, depth=None, elem_id="views")
                labels = gr.HTML(elem_id="labels", visible=bool(explorer.networks))
            with gr.Column(scale=2, min_width=320):
                with gr.Accordion("Scene"):
                    name = gr.Dropdown(names, value=names[0], label="from")
                    number = gr.Slider(0, 1, 0, step=1, label="which one")
                with gr.Accordion("Your own image", open=False):
                    image = gr.File(
                        label="image file", file_types=list(IMAGE_SUFFIXES), height=120, elem_id="image-file"
                    )
                    depth = gr.File(
                        label="depth file", file_types=list(DEPTH_SUFFIXES), height=120, elem_id="depth-file"
                    )
                    with gr.Row():
                        unit = gr.Dropdown(list(DEPTH_UNITS), value="mm", label="one count of a PNG is", min_width=120)
                        length = gr.Number(None, label="focal length, pixels", min_width=120, minimum=0)
                    show = gr.Button("Show it")
                    wrong = gr.HTML(elem_id="wrong")
                controls = Controls.shown(list(layers))
                with gr.Accordion("Depth and camera"):
                    with gr.Row():
                        focal = gr.Slider(1, 9, step=0.1, label="focal length, pixels", min_width=_HALF, buttons=[])
                        faults = [
                            gr.Slider(low, high, value, step=step, label=text, min_width=_HALF, buttons=[])
                            for text, low, high, value, step in _FAULTS
                        ]
                    reset = gr.Button("As it was")

        def picked(name: str, number: float, *layer: Any) -> list[Any]:
            last = len(explorer.sources[name].items) - 1
            index = min(int(number), last)
            slider = gr.Slider(maximum=max(last, 1), value=index, interactive=last > 0)
            try:
                scene = explorer.pick(name, index, layer_of(layer))
            except (ValueError, TypeError, OSError) as error:
                raise gr.Error(escape(str(error)), print_exception=False) from error
            return [slider, *opened(scene, layer_of(layer))]

        def handed(image: str, depth: str, unit: str, length: float, *layer: Any) -> list[Any]:
            try:
                return ["", *opened(Scene.of(handed_in(image, depth, unit, length), layer_of(layer)), layer_of(layer))]
            except ValueError as error:
                return [f'<p class="wrong" role="alert">{escape(str(error))}</p>', *[gr.skip()] * len(outputs)]

        def began(scene: Scene, name: str) -> list[Any]:
            return [*controls_of(layers[name]), drawn(layers[name], scene)]

        outputs = [scene, views, focal, *faults]
        labelled: dict[str, Any] = {"fn": explorer.labelled, "inputs": scene, "outputs": labels}
        pick: dict[str, Any] = {
            "fn": picked, "inputs": [name, number, *controls.all], "outputs": [number, *outputs],
            "show_progress": "hidden",
        }  # fmt: skip
        page.load(lambda: controls_of(next(iter(layers.values()))), None, controls.all).then(**pick).then(**labelled)
        for choice in (name, number):
            choice.input(**pick, trigger_mode="always_last").then(**labelled)
        show.click(handed, [image, depth, unit, length, *controls.all], [wrong, *outputs]).then(**labelled)
        views.select(clicked, [scene, *controls.all], [scene, views], **_FAST)
        changed = [scene, *controls.all]
        regrouping = (controls.conv, controls.kernels)
        for setting in (control for control in controls.all if control not in (*regrouping, controls.scales)):
            setting.input(looked, changed, views, **_FAST)
        for grouping in regrouping:
            grouping.input(regrouped, changed, [*controls.all, views], **_FAST)
        controls.start.input(began, [scene, controls.start], [*controls.all, views], **_FAST)
        focal.input(refocused, [scene, focal, *controls.all], [scene, views], **_FAST)
        for fault in faults:
            fault.input(spoilt, [scene, focal, *faults, *controls.all], [scene, views], **_FAST)
        for control in (focal, *faults):
            control.release(**labelled)
        reset.click(undone, changed, outputs, **_FAST).then(**labelled)
    return page
