"""Figures show the arrays they are given, in one style, as files that do not change."""

from __future__ import annotations

import io
from collections.abc import Callable
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from malleable.figures import curves as figures
from malleable.figures import diagram, pictures
from malleable.figures.history import FieldPath
from malleable.figures.style import (
    BLUE,
    GREEN,
    ORANGE,
    SKY,
    VERMILLION,
    kernels,
    save,
    sides,
)

CENTERS = np.array([-1.0, 0.1, 1.2])
CLASSES, PALETTE = ("wall", "floor", "chair"), ((200, 0, 0), (0, 200, 0), (0, 0, 200))


def random() -> np.random.Generator:
    return np.random.default_rng(0)


def image() -> np.ndarray:
    return random().integers(0, 255, (12, 16, 3), dtype=np.uint8)


def assigning_functions() -> Figure:
    d = np.linspace(-3, 3, 9)
    state = figures.Assigning(d, random().random((5, 9)), random().random((3, 9)), np.array([-2, *CENTERS, 2]), 1.0)
    return figures.assigning_functions({"at the start": state, "res2": state})


def receptive_fields() -> Figure:
    metres = np.linspace(-0.1, 0.1, 9)
    fading = figures.Field(metres, 0.5 * random().random((1, 9)), np.zeros(1))
    ours = figures.Field(metres, 0.5 * random().random((3, 9)), CENTERS)
    return figures.receptive_fields({"depth-aware": {"res2": fading}, "ours": {"res2": ours, "res3": ours}}, 1.0, 260.0)


def narrow_receptive_fields() -> Figure:
    field = figures.Field(np.linspace(-0.1, 0.1, 9), random().random((1, 9)), np.zeros(1))
    return figures.receptive_fields({"depth-aware": {"res5": field}}, 1.0, 260.0)


def narrow_feature_maps() -> Figure:
    name = "res2, layer1.0.conv1"
    return pictures.feature_maps([image()], [random().random((1, 1, 6, 8))], np.zeros(1), [4], name)


def rebalancing() -> Figure:
    shares = (np.array([0.1, 0.7, 0.2]), np.array([0.3, 0.4, 0.3]), -CENTERS)
    return figures.rebalancing({"res2": shares}, "7 images")


def training() -> Figure:
    steps = np.arange(1.0, 4)
    return figures.training({"a": {"loss": (steps, 3 / steps), "miou": (steps, steps)}, "b": {}})


def receptive_field_path() -> Figure:
    centers, scales = np.tile([-2, *CENTERS, 2], (4, 1)), np.full((4, 3), 1 / 3)
    path = FieldPath(np.arange(4.0), centers, np.ones(4), scales)
    return figures.receptive_field_path({"res2": path})


def network() -> Figure:
    stages = [diagram.Stage("res2", 4, 64, ("layer1.0.conv1", "malleable, K = 3")), diagram.Stage("res3", 8, 128)]
    return diagram.network("resnet18", 2, stages, [1, 6, 12], False, 256, 40)


def feature_maps() -> Figure:
    return pictures.feature_maps([image()], [random().standard_normal((3, 2, 6, 8))], CENTERS, [4, 9], "res2")


def neighbours() -> Figure:
    taps = np.array([[x, y] for y in (2, 6, 10) for x in (4, 8, 12)])
    g = np.full((3, 9), 0.25)
    found = pictures.Neighbours((8, 6), taps, g, np.arange(9) > 0)
    return pictures.neighbours(image(), np.ones((12, 16)), found, CENTERS, "res2")


def qualitative() -> Figure:
    label = np.zeros((12, 16), int)
    label[:, 8:] = 2
    label[0] = 255
    return pictures.qualitative([image()], [np.ones((12, 16))], [label], {"ours": [label % 255]}, CLASSES, PALETTE)


ALL = [assigning_functions, receptive_fields, rebalancing, feature_maps, qualitative, neighbours, network, training,
       receptive_field_path]  # fmt: skip


def written(figure: Figure, kind: str) -> bytes:
    file = io.BytesIO()
    save(figure, file, kind)
    return file.getvalue()


def words(figure: Figure) -> list[str]:
    """The text that a reader of the SVG can search."""
    root = ElementTree.fromstring(written(figure, "svg"))
    return ["".join(element.itertext()).strip() for element in root.iter() if element.tag.endswith("}text")]


@pytest.mark.parametrize("draw", ALL, ids=lambda draw: draw.__name__)
def test_the_same_figure_is_the_same_file(draw: Callable[[], Figure]) -> None:
    figure = draw()
    svg = written(figure, "svg")
    assert svg == written(draw(), "svg")
    assert svg == written(figure, "svg")
    assert b"<dc:date>" not in svg
    assert b"<text" in svg
    assert written(figure, "png").startswith(b"\x89PNG")


@pytest.mark.parametrize("draw", [*ALL, narrow_receptive_fields, narrow_feature_maps], ids=lambda draw: draw.__name__)
def test_nothing_is_cut_off(draw: Callable[[], Figure]) -> None:
    figure = draw()
    figure.draw_without_rendering()
    tight = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert min(tight.x0, tight.y0) >= -0.01
    assert tight.x1 <= width + 0.01
    assert tight.y1 <= height + 0.01


def test_all_functions_are_here() -> None:
    from malleable.figures.run import NAMES, Portrait

    assert sorted(draw.__name__ for draw in ALL) == sorted(NAMES)
    assert set(NAMES) < set(vars(Portrait))


def test_settings_of_the_process_are_left_alone() -> None:
    before = dict(matplotlib.rcParams)
    written(rebalancing(), "svg")
    assert dict(matplotlib.rcParams) == before


def test_kernels_are_named_by_the_sign_of_their_center_not_by_their_number() -> None:
    assert sides([-1, 0, 1]) == ["behind", "same depth", "in front"]
    assert sides([1.3, 0.2, -0.9]) == ["in front", "same depth", "behind"]
    assert sides([-0.5, 0.5]) == ["behind", "in front"]
    assert sides([-0.4, 0.6]) == ["behind", "in front"]
    assert sides([-1.03, -0.46, 0.52]) == ["behind", "behind", "in front"]
    assert sides([-1.1, -0.45, 1.0]) == ["behind", "same depth", "in front"]
    assert sides([0.4]) == ["same depth"]
    assert sides([0.6]) == ["in front"]


def test_several_kernels_of_a_side_are_told_apart() -> None:
    names = ["further behind", "behind", "same depth", "in front", "further in front"]
    assert [kernel.label for kernel in kernels([-2, -1, 0, 1, 2])] == names
    assert [kernel.label for kernel in kernels([3, 2, 1])] == ["further in front 2", "further in front", "in front"]


def test_a_kernel_keeps_its_colour_whatever_the_number_of_kernels() -> None:
    assert [kernel.colour for kernel in kernels([0])] == [GREEN]
    assert [kernel.colour for kernel in kernels([-1, 0, 1])] == [BLUE, GREEN, VERMILLION]
    assert [kernel.colour for kernel in kernels([2, 1, 0, -1, -2])] == [ORANGE, VERMILLION, GREEN, BLUE, SKY]


def test_the_legend_goes_from_behind_to_in_front_whatever_layers_have_learned() -> None:
    metres = np.linspace(-0.1, 0.1, 9)
    layers = {
        f"res{stage}": figures.Field(metres, random().random((3, 9)), np.array(centers))
        for stage, centers in ((2, [0.5, -0.46, -1.0]), (3, [-1.1, 0.0, 1.0]))
    }
    (legend,) = figures.receptive_fields({"ours": layers}, 1.0, 260.0).legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["further behind", "behind", "same depth", "in front"]


def test_receptive_fields_are_scaled_to_the_highest_kernel_of_a_panel() -> None:
    metres, g = np.linspace(-0.1, 0.1, 9), np.array([np.linspace(0, 0.4, 9), np.linspace(0.2, 0, 9)])
    figure = figures.receptive_fields({"ours": {"res2": figures.Field(metres, g, np.array([-1, 1]))}}, 20.0, 2262.0)
    for line, values, colour in zip(figure.axes[0].lines, g, (BLUE, VERMILLION), strict=True):
        np.testing.assert_allclose(line.get_xydata(), np.transpose([metres, values / 0.4]))
        assert line.get_color() == colour
    assert any("20 m" in text and "2262 px" in text for text in words(figure))


def test_bars_are_the_shares_from_behind_to_in_front() -> None:
    figure = rebalancing()  # its centers go from in front to behind
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    np.testing.assert_allclose(heights, [20, 70, 10, 30, 40, 30])
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["behind", "same\ndepth", "in\nfront"]
    assert any("7 images" in text for text in words(figure))


def test_curves_are_what_was_measured_and_panels_only_those_there_are() -> None:
    figure = training()
    assert [axes.get_title() for axes in figure.axes] == ["training loss", "validation mIoU (%)"]
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), [3, 1.5, 1])


def test_the_error_map_tells_who_is_right() -> None:
    label = np.array([[0, 0, 0, 0, 255]])
    first, last = np.array([[0, 1, 0, 1, 1]]), np.array([[0, 0, 1, 1, 1]])
    pixels = np.zeros((1, 5, 3), np.uint8)
    predictions = {"RGB": [first], "ours": [last]}
    figure = pictures.qualitative([pixels], [np.ones((1, 5))], [label], predictions, CLASSES, PALETTE)
    panel = next(axes for axes in figure.axes if axes.get_title() == "errors")
    colours = [to_hex(pixel) for pixel in np.asarray(panel.images[0].get_array())[0]]
    meaning = {text.get_text(): to_hex(patch.get_facecolor()) for text, patch in _legend(figure)}
    expected = ["both right", "only ours right", "only RGB right", "both wrong", "unlabelled"]
    assert colours == [meaning[name] for name in expected]


def _legend(figure: Figure) -> list[tuple[object, object]]:
    (legend,) = figure.legends
    return list(zip(legend.get_texts(), legend.get_patches(), strict=True))


def test_the_legend_names_only_classes_that_occur() -> None:
    names = [text.get_text() for text, _ in _legend(qualitative())]  # type: ignore[attr-defined]
    assert names == ["wall", "chair", "unlabelled", "right", "wrong"]


def test_unknown_depth_has_a_colour_that_no_known_depth_has() -> None:
    depth = np.array([[0.0, np.nan, np.inf, -1.0, 1.0, 2.0]])
    label = np.zeros((1, 6), int)
    figure = pictures.qualitative([np.zeros((1, 6, 3), np.uint8)], [depth], [label], {"a": [label]}, CLASSES, PALETTE)
    shown = np.asarray(next(axes for axes in figure.axes if axes.get_title() == "depth").images[0].get_array())[0]
    assert (shown[:4] == shown[0]).all()
    colours = matplotlib.colormaps[pictures.DEPTH_COLOURS](np.linspace(0, 1, 256))[:, :3]
    unknown, known = (np.atleast_2d(part) @ [0.299, 0.587, 0.114] for part in (shown[0], colours))
    assert min(abs(unknown - known)) > 0.1  # in brightness, so that all can tell, on any screen and in print
    assert any("white: unknown" in text for text in words(figure))


MATHS = r"$\frac{a}{$ _x_ $5 \$"


def with_names() -> list[Figure]:
    """Figures with all words that are not their own."""
    label, depth = np.zeros((12, 16), int), np.ones((12, 16))
    field = figures.Field(np.arange(3.0), np.ones((1, 3)), np.zeros(1))
    taps, g = np.array([[8, 6]]), np.ones((1, 1))
    centers, ones = np.array([-1.0, 0.0, 1.0]), np.ones((1, 1))
    assigning = figures.Assigning(np.arange(2.0), np.ones((3, 2)), np.ones((1, 2)), centers, 1.0)
    return [
        pictures.qualitative([image()], [depth], [label], {MATHS: [label]}, [MATHS], PALETTE[:1]),
        figures.receptive_fields({MATHS: {"res2": field}}, 1.0, 260.0),
        figures.rebalancing({MATHS: (np.ones(1), np.ones(1), np.zeros(1))}, MATHS),
        figures.training({MATHS: {"loss": (np.ones(1), np.ones(1))}, "b": {"loss": (np.ones(1), np.ones(1))}}),
        pictures.feature_maps([image()], [np.ones((1, 1, 6, 8))], np.zeros(1), [0], MATHS),
        pictures.neighbours(image(), depth, pictures.Neighbours((8, 6), taps, g, np.ones(1, bool)), np.zeros(1), MATHS),
        diagram.network(MATHS, 2, [diagram.Stage("res2", 4, 64, (MATHS,))], [1], False, 256, 40),
        figures.assigning_functions({MATHS: assigning}),
        figures.receptive_field_path({MATHS: FieldPath(np.ones(1), centers[None], np.ones(1), ones)}),
    ]


@pytest.mark.parametrize("usetex", [False, True])
def test_names_are_drawn_as_they_are(usetex: bool) -> None:
    with matplotlib.rc_context({"text.usetex": usetex}):
        for figure in with_names():
            drawn = "".join(words(figure))
            assert "".join(MATHS.split()) in "".join(drawn.split())


@pytest.mark.parametrize("draw", ALL, ids=lambda draw: draw.__name__)
def test_symbols_are_drawn_as_mathematics(draw: Callable[[], Figure]) -> None:
    assert not any("$" in text for text in words(draw()))


def test_pictures_without_any_depth_are_drawn() -> None:
    label = np.zeros((4, 5), int)
    black = np.zeros((4, 5, 3), np.uint8)
    figure = pictures.qualitative([black], [np.zeros((4, 5))], [label], {"a": [label]}, CLASSES, PALETTE)
    assert written(figure, "png")


def test_the_area_of_a_circle_is_what_the_kernel_takes() -> None:
    panel = next(axes for axes in neighbours().axes if axes.get_title() == "in front")
    rim, filled = (circles.get_sizes() for circles in panel.collections)
    np.testing.assert_allclose(filled, 0.25 * rim[0] * np.ones(8))  # one of nine taps lies outside


def test_feature_maps_of_a_row_share_a_scale_and_add_up() -> None:
    figure = feature_maps()
    row = figure.axes[1:5]
    assert [axes.get_title() for axes in row] == ["behind", "same depth", "in front", "sum"]
    maps = [np.asarray(axes.images[0].get_array()) for axes in row]
    np.testing.assert_allclose(sum(maps[:3]), maps[3])
    assert len({axes.images[0].get_clim() for axes in row}) == 1


def test_the_diagram_says_strides_and_replaced_layers() -> None:
    text = " ".join(words(network()))
    for part in ("stem", "1/2", "res3", "1/8", "layer1.0.conv1", "malleable, K = 3", "1, 6, 12", "skip from res2"):
        assert part in text
    assert "40 classes" in text
