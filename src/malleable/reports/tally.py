"""The figures of a study: what each run reached, and what a row's runs reached together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from malleable.files import read_json
from malleable.reports.paper import paper_row
from malleable.reports.plan import Plan, PlannedRun
from malleable.reports.statistics import Average, shown, shown_p
from malleable.runs.config import Config
from malleable.runs.folder import differences
from malleable.runs.log import read_log, validations
from malleable.runs.scores import SCORES


@dataclass(frozen=True)
class Result:
    """What one finished run reached, in percent, at its last step.

    ``curve`` has the mIoU of all validations by step, ``receptive_field`` the learned parameters by layer and name.
    """

    config: Config
    figures: dict[str, float]
    iou: dict[str, float]
    curve: dict[int, float]
    receptive_field: dict[str, float]
    images_per_second: float

    @property
    def tested_on(self) -> tuple[str, str]:
        return self.config.data.root, self.config.data.val

    @classmethod
    def of_run(cls, folder: Path, config: Config) -> Result | None:
        """Read a run's metrics.jsonl; None if it has not been validated after its last step."""
        rows = read_log(folder)
        last = [row for row in rows if row.step == config.train.steps]
        scores = next((row for row in reversed(last) if row.miou is not None), None)
        if scores is None:
            return None
        return cls(
            config,
            dict(scores.scores),
            dict(scores.iou),
            validations(rows),
            {
                name: value
                for row in last
                for layer, learned in row.receptive_fields.items()
                for name, value in learned.columns(layer).items()
            },
            median(speed for row in rows if (speed := row.training.get("images_per_second")) is not None),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        """What :meth:`to_dict` gave."""
        return cls(
            Config.from_dict(values["settings"]),
            {name: values[name] for name in SCORES},
            values["iou"],
            {int(step): value for step, value in values["curve"].items()},
            values["receptive_field"],
            values["images_per_second"],
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.figures,
            "iou": self.iou,
            "curve": self.curve,
            "receptive_field": self.receptive_field,
            "images_per_second": self.images_per_second,
            "settings": self.config.to_dict(),
        }


class Tally:
    """The results of a study's finished runs.

    Spreads are sample standard deviations over seeds. The gain of a row is over the first row, seed by seed: runs with
    the same seed saw the same images in the same order. Its p-value is that of the t-test over those differences.
    """

    def __init__(self, plan: Plan, results: Mapping[PlannedRun, Result]) -> None:
        self.plan, self.results = plan, dict(results)

    def of_row(self, row: str) -> dict[int, Result]:
        """By seed."""
        return {run.seed: result for run, result in self.results.items() if run.row == row}

    def gains(self, row: str) -> list[float]:
        """mIoU of ``row`` above the first row, of the seeds that both have; none if they were tested on other data."""
        first, own = self.of_row(self.plan.rows[0]), self.of_row(row)
        return [
            run.figures["miou"] - first[seed].figures["miou"]
            for seed, run in own.items()
            if seed in first and run.tested_on == first[seed].tested_on
        ]

    def to_dict(self) -> dict[str, Any]:
        """What results.json holds."""
        return {
            "title": self.plan.title,
            "rows": [
                {
                    "name": row,
                    **{name: _summary(run.figures[name] for run in own.values()) for name in SCORES},
                    "gain": _summary(self.gains(row), tested=row != self.plan.rows[0]),
                    "runs": {seed: run.to_dict() for seed, run in own.items()},
                }
                for row in self.plan.rows
                if (own := self.of_row(row))
            ],
        }

    def cells(self) -> list[list[str]]:
        """The table: a heading, then a line for each row with a result; the paper's column if it has any of them."""
        lines = self._figures()
        papers = [paper_row(next(iter(self.of_row(row).values())).config) for row in self._done]
        if any(papers):
            column = ["" if paper is None else f"{paper.miou:.2f} ({paper.label})" for paper in papers]
            lines = [[*line, cell] for line, cell in zip(lines, ["paper's mIoU", *column], strict=True)]
        return lines

    @property
    def _done(self) -> list[str]:
        return [row for row in self.plan.rows if self.of_row(row)]

    def _figures(self) -> list[list[str]]:
        first = self.plan.rows[0]
        lines = [["", "seeds", *SCORES.values(), f"mIoU above {first}", "p"]]
        for row in self._done:
            figures = [shown(Average.of(run.figures[name] for run in self.of_row(row).values())) for name in SCORES]
            lines.append([row, str(len(self.of_row(row))), *figures, *(["", ""] if row == first else self._gain(row))])
        return lines if any(line[-1] for line in lines[1:]) else [line[:-1] for line in lines]

    def _gain(self, row: str) -> list[str]:
        """With its number of seeds if that is not the row's, and its p-value."""
        gain = Average.of(self.gains(row))
        number = f" (n = {gain.n})" if gain and gain.n < len(self.of_row(row)) else ""
        return [shown(gain, "+") + number, shown_p(gain)]

    def learned(self) -> list[list[str]]:
        """Where the receptive fields of malleable rows ended, a heading and a line for each row and layer."""
        lines = [["", "layer", "centers", "temperature", "scales"]]
        for row in self.plan.rows:
            fields = [run.receptive_field for run in self.of_row(row).values()]
            for layer in dict.fromkeys(name.rpartition("/")[0] for field in fields for name in field):
                values = {
                    name.rpartition("/")[2]: [field[name] for field in fields]
                    for name in fields[0]
                    if name.startswith(f"{layer}/")
                }
                learned = [
                    ", ".join(shown(Average.of(values[name])) for name in values if name.startswith(kind))
                    for kind in ("center_", "temperature", "scale_")
                ]
                lines.append([row, layer, *learned])
        return lines

    def to_markdown(self) -> str:
        """The figures below their title, then the learned receptive fields if there are any."""
        learned = self.learned()
        tables = [self.cells(), *([learned] if len(learned) > 1 else [])]
        return "\n".join([f"{self.plan.title}\n", *map(markdown, tables)])

    def print(self) -> None:
        """A table on standard output."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        heading, *lines = self._figures()
        several = any(len(self.of_row(row)) > 1 for row in self.plan.rows)
        table = Table(
            title=self.plan.title,
            caption="percent"
            + ("; mean ± standard deviation over seeds" if several else "")
            + ("; p of the gain by a two-sided t-test" if "p" in heading else ""),
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for place, cell in enumerate(heading):  # figures stay on one line, names may be long
            table.add_column(fill(cell, 12), justify="right" if place else "left", no_wrap=place > 0, vertical="bottom")
        for line in lines:
            table.add_row(*line)
        Console(markup=False, emoji=False).print(table)


def read_results(path: Path, plan: Plan) -> dict[PlannedRun, Result]:
    """The results of ``plan``'s runs in a results.json; refuses those of other settings, and to forget any."""
    if not path.is_file():
        return {}
    content = read_json(path)
    try:
        rows = {row["name"]: row["runs"] for row in content["rows"]}
        kept = {(name, int(seed)): Result.from_dict(run) for name, runs in rows.items() for seed, run in runs.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path} is not what a study writes, or of another version ({what}); use another record folder"
        ) from error
    found = {run: kept.pop((run.row, run.seed)) for run in plan.runs if (run.row, run.seed) in kept}
    if kept:
        names = "; ".join(f"{row}, seed {seed}" for row, seed in kept)
        raise ValueError(
            f"{path} has results that the study does not ask for any more: {names}. Use another record folder, or put "
            "these rows and seeds back"
        )
    for run, result in found.items():
        changed = differences(result.config, run.config)
        if changed:
            raise ValueError(
                f"{path} has a result of {run} with other settings: {'; '.join(changed)}. Use another record folder, "
                "or move the old results away"
            )
    return found


def markdown(cells: list[list[str]]) -> str:
    """A table of a heading and lines; all columns but the first are aligned to the right."""
    heading, *lines = (f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in cells)
    rule = "|---|" + "---:|" * (len(cells[0]) - 1)
    return "\n".join([heading, rule, *lines]) + "\n"


def _summary(values: Iterable[float], tested: bool = False) -> dict[str, float] | None:
    """For results.json, without what there is not; ``tested`` adds the p-value."""
    average = Average.of(values)
    if average is None:
        return None
    found = average._asdict() | ({"p": average.p_value} if tested else {})
    return {name: value for name, value in found.items() if value is not None}
