"""Geometry survives augmentation: what depth, label and camera do under torchvision's v2 transforms."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from malleable import Camera
from malleable.data.sample import Sample
from malleable.data.tv_tensors import IGNORE, Depth, nearest


def numbered(height: int, width: int, **camera: float) -> Sample:
    """A sample whose depth, 1 + number / 4096, and label say which pixel a value came from."""
    number = torch.arange(1, height * width + 1).view(height, width)
    lens = Camera(**{"fx": 30.0, "fy": 33.0, "cx": 7.3, "cy": 5.1, **camera}, size=(height, width))
    ramp = torch.stack([number * 0.0, *torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")])
    return Sample(ramp.float(), (1 + number[None] / 4096).float(), number % 250, lens, "numbered")


def sources(sample: Sample, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which pixels survived, (H, W) bool, and the row and column they had before, from their depth."""
    known = sample.depth[0] > 0
    number = ((sample.depth[0].double() - 1) * 4096).round().long() - 1
    return known, number // width, number % width


class Apply(v2.Transform):
    """One functional with fixed arguments, as a transform of whole samples."""

    def __init__(self, functional, **kwargs) -> None:
        super().__init__()
        self.functional, self.kwargs = functional, kwargs

    def transform(self, inpt, params):
        return self._call_kernel(self.functional, inpt, **self.kwargs)


small, offset = st.integers(3, 24), st.integers(-4, 8)
sizes = st.tuples(small, small).map(list)
windows = st.fixed_dictionaries({"top": offset, "left": offset, "height": small, "width": small})
steps = st.one_of(
    st.builds(lambda size: (F.resize, {"size": size}), sizes),
    st.builds(lambda window: (F.crop, window), windows),
    st.builds(lambda size: (F.center_crop, {"output_size": size}), sizes),
    st.builds(lambda sides: (F.pad, {"padding": list(sides)}), st.tuples(*[st.integers(0, 5)] * 4)),
    st.builds(lambda window, size: (F.resized_crop, {**window, "size": size, "antialias": True}), windows, sizes),
    st.just((F.horizontal_flip, {})),
    st.just((F.vertical_flip, {})),
)


@given(st.tuples(small, small), st.lists(steps, max_size=5))
def test_chains_of_transforms_keep_3d_points(size, chain):
    before = numbered(*size)
    after, mirror, slack = before, [1, 1], [0.0, 0.0]  # x, y
    scale = [1.0, 1.0]  # pixels now per pixel of the original
    for functional, kwargs in chain:
        height, width = after.camera.size
        if "top" in kwargs:  # torchvision's own crop has another size than asked for where it misses the image
            assume(-kwargs["height"] < kwargs["top"] < height and -kwargs["width"] < kwargs["left"] < width)
        old = kwargs.get("width", width), kwargs.get("height", height)
        after = Apply(functional, **kwargs)(after)
        if "size" in kwargs:
            for axis, new in enumerate(reversed(kwargs["size"])):
                slack[axis] += 0.5 / scale[axis] if new != old[axis] else 0.0
                scale[axis] *= new / old[axis]
        mirror[0] *= -1 if functional is F.horizontal_flip else 1
        mirror[1] *= -1 if functional is F.vertical_flip else 1

    assert after.image.shape[-2:] == after.depth.shape[-2:] == after.label.shape == after.camera.size
    known, rows, columns = sources(after, size[1])
    then = before.camera.back_project(before.depth[0].double())[:, rows[known], columns[known]]
    now = after.camera.back_project(after.depth[0].double())[:, known]
    assert torch.equal(now[2], then[2])  # depth itself is exact: no value is ever mixed
    for axis, focal in enumerate((before.camera.fx, before.camera.fy)):
        moved = (now[axis] - mirror[axis] * then[axis]).abs() / now[2] * focal  # in pixels of the original
        assert (moved <= slack[axis] + 1e-6).all()
    assert torch.equal(after.label[known], before.label[rows[known], columns[known]])
    assert (after.label[~known] == IGNORE).all()


@given(st.integers(1, 60), st.integers(1, 60))
def test_nearest_takes_the_pixel_whose_center_is_nearest(old, new):
    for i, source in enumerate(nearest(old, new).tolist()):
        looks_at = (Fraction(2 * i + 1, 2)) * old / new - Fraction(1, 2)
        assert abs(looks_at - source) == min(abs(looks_at - pixel) for pixel in range(old))


def test_depth_and_label_resize_alike_at_odd_factors_without_error():
    after = v2.Resize((4, 5))(numbered(12, 15))  # by 1/3: each new center is an old center
    known, rows, columns = sources(after, 15)
    assert known.all()
    assert rows[:, 0].tolist() == [1, 4, 7, 10]
    assert columns[0].tolist() == [1, 4, 7, 10, 13]


@given(st.tuples(st.integers(12, 24), st.integers(12, 24)), st.tuples(st.integers(6, 48), st.integers(6, 48)))
def test_image_and_camera_agree_after_resize_crop_flip(size, resized):
    """The image holds its own coordinates: what the new camera says pixel i looks at must be what is shown there."""
    before = numbered(*size)
    chain = [Apply(F.resize, size=list(resized)), Apply(F.crop, top=1, left=2, height=4, width=3), Apply(F.hflip)]
    after = v2.Compose(chain)(before)
    x = (torch.arange(3) - after.camera.cx) / after.camera.fx * -before.camera.fx + before.camera.cx
    y = (torch.arange(4) - after.camera.cy) / after.camera.fy * before.camera.fy + before.camera.cy
    for seen, said, length in ((after.image[2, 0], x, size[1]), (after.image[1, :, 0], y, size[0])):
        inner = (said > 3) & (said < length - 4)  # the filter bends the ramp at the image's border
        assert (seen - said)[inner].abs().lt(0.1).all()  # pixels; its weights are not quite symmetric either


@pytest.mark.parametrize("size", [(7, 9), (8, 10), (20, 30), (3, 30)])
@pytest.mark.parametrize("crop", [(4, 4), (5, 5), (8, 9), (21, 12)])
def test_center_crop_moves_the_camera_as_torchvision_moves_the_image(size, crop):
    before = numbered(*size)
    after = v2.CenterCrop(crop)(before)
    known, rows, columns = sources(after, size[1])
    y, x = known.nonzero()[0].tolist()
    assert before.camera.cy - rows[y, x] == pytest.approx(after.camera.cy - y)
    assert before.camera.cx - columns[y, x] == pytest.approx(after.camera.cx - x)


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
def test_padding_is_without_depth_in_every_mode(mode):
    after = v2.Pad(2, fill=7, padding_mode=mode)(numbered(6, 8))
    assert (after.depth[:, :2] == 0).all()
    assert (after.label[0, 0] == IGNORE) == (mode == "constant")


@pytest.mark.parametrize(
    "transform",
    [
        v2.RandomShortestSize([9, 10, 11], max_size=14),
        v2.Resize(7),
        v2.ScaleJitter((20, 20)),
        v2.RandomResize(6, 12),
        v2.RandomResizedCrop((8, 9)),
        v2.RandomCrop((14, 20), pad_if_needed=True),
        v2.RandomZoomOut(p=1.0),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_every_stock_transform_keeps_one_size(transform):
    after = transform(numbered(12, 16))
    assert tuple(after.image.shape[-2:]) == tuple(after.depth.shape[-2:]) == after.camera.size == after.label.shape


@pytest.mark.parametrize(
    "transform", [v2.RandomRotation(20), v2.RandomAffine(10), v2.RandomPerspective(p=1.0), v2.ElasticTransform()]
)
def test_transforms_without_a_pinhole_camera_are_refused(transform):
    with pytest.raises(TypeError, match="no pinhole camera"):
        transform(numbered(48, 64))


def test_without_a_camera_rotation_fills_depth_and_label_with_unknown():
    sample = numbered(9, 9)
    depth, label = v2.RandomRotation((45, 45))(sample.depth, sample.label)
    assert depth[0, 0, 0] == 0
    assert label[0, 0] == IGNORE
    assert set(depth.unique().tolist()) <= {0.0, *sample.depth.unique().tolist()}


def test_colour_transforms_touch_the_image_only():
    sample = numbered(8, 9)
    after = v2.Compose([v2.GaussianBlur(3), v2.Normalize([0.0] * 3, [2.0] * 3)])(sample)
    assert torch.equal(after.depth, sample.depth)
    assert torch.equal(after.label, sample.label)
    assert after.camera == sample.camera
    assert not torch.equal(after.image, sample.image)


def test_a_camera_is_followed_in_any_container():
    entries = {"picture": tv_tensors.Image(torch.zeros(3, 10, 20)), "lens": [Camera(10.0, 10.0, 9.5, 4.5, (10, 20))]}
    assert v2.Resize((20, 40))(entries)["lens"] == [Camera(20.0, 20.0, 19.5, 9.5, (20, 40))]


def test_plain_tensors_need_no_wrapping_by_the_user():
    image, depth, label = torch.zeros(3, 8, 9), torch.ones(1, 8, 9), torch.zeros(8, 9, dtype=torch.int64)
    after = v2.Resize((16, 18))(Sample(image, depth, label, Camera(10.0, 10.0, 4.0, 3.5, (8, 9))))
    assert after.depth.shape == (1, 16, 18)
    assert after.label.shape == (16, 18)
    assert after.camera.fx == 20.0


def test_a_transform_of_the_image_alone_is_noticed():
    class Shrink(v2.Transform):
        _transformed_types = (tv_tensors.Image,)

        def transform(self, inpt, params):
            return F.resize(inpt, [4, 4])

    with pytest.raises(ValueError, match="image must be"):
        Shrink()(numbered(8, 9))


def test_types_are_kept():
    after = v2.Resize((5, 6))(numbered(8, 9))
    assert isinstance(after, Sample)
    assert isinstance(after.depth, Depth)
    assert after.depth.dtype == torch.float32
    assert after.label.dtype == torch.int64
    assert after.id == "numbered"
