"""Table 1 of the paper, and the cost of one's own network against counts made by hand."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import malleable as mb
from helpers.networks import Tiny
from malleable.cli import main
from malleable.models.cost import Row, measure, operations_per_tap, table

BASELINE, DEPTH_AWARE, MALLEABLE_1, CONV25D, MALLEABLE_3 = range(5)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return table()


class TestTable1:
    def test_parameters_agree_to_the_third_decimal_of_a_million(self, rows: list[Row]) -> None:
        assert [f"{row.parameters:.3f}" for row in rows] == ["59.468", "59.468", "59.468", "65.734", "65.734"]
        assert [row.paper_parameters for row in rows] == [59.468, 59.468, 59.468, 65.734, 65.734]

    def test_multiply_adds_agree_within_three_tenths_of_a_percent(self, rows: list[Row]) -> None:
        for row in rows:
            assert row.multiply_adds == pytest.approx(row.paper_multiply_adds, rel=0.003)

    @pytest.mark.parametrize(
        ("row", "reference"),
        [(DEPTH_AWARE, BASELINE), (MALLEABLE_1, BASELINE), (CONV25D, BASELINE), (MALLEABLE_3, CONV25D)],
    )
    def test_rows_differ_as_in_the_paper(self, rows: list[Row], row: int, reference: int) -> None:
        ours = rows[row].multiply_adds - rows[reference].multiply_adds
        paper = rows[row].paper_multiply_adds - rows[reference].paper_multiply_adds
        assert ours == pytest.approx(paper, abs=0.001)  # two figures, each rounded to 0.001


class TestMeasure:
    def test_a_plain_convolution(self) -> None:
        cost = measure(nn.Conv2d(3, 8, 3, padding=1), (10, 12))
        assert (cost.parameters, cost.products, cost.assignment) == (8 * 3 * 9 + 8, 8 * 3 * 9 * 120, 0)

    @pytest.mark.parametrize(
        ("conv", "kernels", "per_tap", "added"),
        [("malleable", 3, 27, 9), ("malleable", 1, 15, 5), ("conv25d", 3, 6, 0), ("depth_aware", 1, 3, 0)],
    )
    def test_a_converted_convolution(self, conv: str, kernels: int, per_tap: int, added: int) -> None:
        net = mb.convert(nn.Conv2d(3, 8, 3, stride=2, padding=1), conv, kernels, where="all")
        cost = measure(net, (10, 12), batch=2)
        pixels = 2 * 5 * 6
        assert operations_per_tap(net.model) == per_tap
        assert cost.parameters == kernels * 8 * 3 * 9 + 8 + added
        assert cost.products == kernels * 8 * 3 * 9 * pixels
        assert cost.assignment == per_tap * 9 * pixels
        assert cost.multiply_adds == cost.products + cost.assignment

    def test_the_network_is_left_alone(self) -> None:
        net = mb.convert(Tiny().train())
        before = {key: value.clone() for key, value in net.state_dict().items()}
        measure(net, (32, 32))
        assert net.training
        assert all(type(p) is nn.Parameter and type(p.data) is torch.Tensor for p in net.parameters())
        assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
        assert not any(layer._forward_hooks for layer in net.layers().values())


class TestCommand:
    def test_json_on_ones_own_backbone_and_size(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["cost", "--json", "--backbone", "test_resnet", "--size", "48", "64", "--classes", "4"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [row["method"] for row in rows] == [
            "Baseline", "Depth-aware", "Malleable 2.5D", "2.5D", "Malleable 2.5D"
        ]  # fmt: skip
        assert {row["paper_multiply_adds"] for row in rows} == {None}
        assert rows[0]["assignment"] == 0 < rows[1]["assignment"] < rows[3]["assignment"] < rows[4]["assignment"]

    def test_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["cost", "--backbone", "test_resnet", "--size", "[48,64]"]) == 0
        printed = capsys.readouterr().out
        assert "48×64" in printed
        assert "Depth-aware" in printed
        assert "paper" not in printed

    def test_a_wrong_backbone_is_one_line_and_exit_code_1(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["cost", "--backbone", "resnet1"]) == 1
        assert capsys.readouterr().err.startswith("malleable cost: backbone must be a timm model")
