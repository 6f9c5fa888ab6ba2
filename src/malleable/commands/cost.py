"""``malleable cost`` puts parameters and multiply-adds beside the paper's Table 1."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from typing import Literal

from malleable.models.cost import table
from malleable.reports.tables import print_cells


def cost(
    backbone: str = "resnet101s",
    size: tuple[int, int] = (768, 768),
    classes: int = 19,
    output_stride: int = 16,
    merge: bool | Literal["released"] = False,
    json: bool = False,
) -> None:
    """Print parameters and multiply-adds of DeepLabv3+ with each convolution, beside the paper's Table 1.

    Args:
        backbone: any timm model.
        size: height and width of the image.
        classes: number of classes.
        output_stride: 8, 16 or 32.
        merge: the multi-stage merging block, or released, the network of the authors' code.
        json: print JSON instead of a table.
    """
    rows = table(backbone, size, classes, output_stride, merge)
    if json:
        print(json_format.dumps([asdict(row) for row in rows], indent=2))
        return
    first = rows[0]
    cells = [["method", "K", "G", "ΔG", "M", *(("paper G", "ΔG", "M") if first.paper_multiply_adds else ())]]
    for row in rows:
        line = [row.method, str(row.kernels), *_numbers(row.multiply_adds, first.multiply_adds, row.parameters)]
        if row.paper_multiply_adds and first.paper_multiply_adds and row.paper_parameters:
            line += _numbers(row.paper_multiply_adds, first.paper_multiply_adds, row.paper_parameters)
        cells.append(line)
    print_cells(
        cells,
        f"DeepLabv3+ on {backbone}, {size[0]}×{size[1]}, {classes} classes, output stride {output_stride}",
        "G: multiply-adds in 10⁹; ΔG: on top of the baseline; M: parameters in 10⁶",
    )


def _numbers(multiply_adds: float, baseline: float, parameters: float) -> list[str]:
    return [f"{multiply_adds:.3f}", f"{multiply_adds - baseline:+.3f}", f"{parameters:.3f}"]
