"""The paper's figures, against the comments of the configs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from malleable.reports.paper import ROWS, paper_row
from malleable.runs.config import Config, DataConfig, ModelConfig
from malleable.runs.settings import read_settings

CONFIGS = Path(__file__).parents[2] / "configs"
FIGURES = re.compile(r"mIoU (\d+\.\d+), pixel accuracy (\d+\.\d+)")
STATED = [path for kind in ("nyudv2", "cityscapes") for path in sorted((CONFIGS / kind).glob("r[0-9]*.yaml"))]


def config_of(path: Path) -> Config:
    settings = read_settings(path)
    model = {key: tuple(value) if isinstance(value, list) else value for key, value in settings["model"].items()}
    return Config(ModelConfig(**model), DataConfig(root=settings["data"]["root"]))


def tables(text: str) -> set[int]:
    """The numbers in "Tables 2 and 4 to 7"."""
    ranges = re.findall(r"(\d)(?: to (\d))?", text)
    return {number for first, last in ranges for number in range(int(first), int(last or first) + 1)}


@pytest.mark.parametrize("path", STATED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_config_gets_the_row_that_its_comment_states(path: Path) -> None:
    comment = path.read_text().splitlines()[1]
    stated = FIGURES.search(comment)
    assert stated is not None
    row = paper_row(config_of(path))
    assert row is not None
    assert (row.miou, row.pixel_accuracy) == (float(stated[1]), float(stated[2]))
    assert tables(row.table) <= tables(comment.partition(",")[0])


def test_every_row_belongs_to_one_config() -> None:
    reached = [paper_row(config_of(path), several_scales) for path in STATED for several_scales in (False, True)]
    assert set(map(id, reached)) == set(map(id, ROWS))


def test_several_scales_have_a_row_of_their_own() -> None:
    row = paper_row(config_of(CONFIGS / "nyudv2" / "r50_malleable.yaml"), several_scales=True)
    assert row is not None
    assert (row.miou, row.pixel_accuracy) == (49.7, 76.3)
    assert row.label == "Table 3: NYUDv2 full size, ResNet-50, 40k iterations, multi-scale + flip"


def test_backbone_and_budget_do_not_matter_and_defaults_may_be_spelled_out() -> None:
    config = Config(
        ModelConfig("resnet18", centers=(-2, -1, 0, 1, 2), learnable=("rebalance", "temperature", "centers")),
        DataConfig(root="/somewhere/nyudv2-half"),
    )
    row = paper_row(config)
    assert row is not None
    assert row.miou == 48.80
    assert "ResNet-50" in row.label


@pytest.mark.parametrize(
    "model",
    [ModelConfig(kernels=2), ModelConfig(conv="conv25d", kernels=5), ModelConfig(stages=(5,)),
     ModelConfig(kernels=1, temperature=2.0), ModelConfig(conv=None, depth_input="metric"),
     ModelConfig(conv=None, depth_encoder="metric"), ModelConfig(depth_input="relative"),
     ModelConfig(smooth_depth=2)],
)  # fmt: skip
def test_what_the_paper_did_not_try_has_no_row(model: ModelConfig) -> None:
    assert paper_row(Config(model, DataConfig(root="data/nyudv2"))) is None


def test_other_data_have_no_row() -> None:
    config = config_of(CONFIGS / "nyudv2" / "r50_malleable.yaml")
    assert paper_row(replace(config, data=DataConfig(root="rooms"))) is None
