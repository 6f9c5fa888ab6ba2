"""Puts runs beside each other: means, spreads and gains are computed once for terminal, Markdown and HTML."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from malleable.files import read_json
from malleable.reports.outcome import Run
from malleable.reports.paper import PaperRow, paper_row
from malleable.reports.plan import Plan, PlannedRun
from malleable.reports.statistics import Average
from malleable.runs.config import Config
from malleable.runs.folder import differences
from malleable.runs.scores import BEYOND, SCORES, Scores


@dataclass(frozen=True)
class Compared:
    """Holds one row of a comparison: runs that are shown as one, usually several seeds of a method.

    Args:
        counted: the runs that were measured alike and after as many steps, with their scores: the largest such set.
        scores, iou: means over these runs, by the name of the score and by class; None if no run has it.
        stress, splits: the mean mIoU by the name of a fault of depth, or of another split, where that was measured.
        last_quarter: what the last quarter of the updates added to its mIoU; little if it has levelled off.
        gain: how far its mIoU is above the baseline's, over the seeds that both have, or of one run each. None if there
            is no such pair, or if the two were not measured alike, at the same step or the end of training.
    """

    name: str
    runs: tuple[Run, ...]
    counted: tuple[tuple[Run, Scores], ...]
    scores: Mapping[str, Average | None]
    iou: Mapping[str, Average | None]
    gain: Average | None
    stress: Mapping[str, Average | None]
    splits: Mapping[str, Average | None]
    last_quarter: Average | None

    @property
    def config(self) -> Config:
        return self.runs[0].config

    @property
    def miou(self) -> Average | None:
        return self.scores["miou"]

    @property
    def setting(self) -> str | None:
        return self.counted[0][1].setting if self.counted else None

    @property
    def seeds(self) -> set[int]:
        """Give the seeds of the runs that its scores are from."""
        return {run.config.train.seed for run, _ in self.counted}

    @property
    def paper(self) -> PaperRow | None:
        """Find what the paper reached with this method on this data, on as many scales if it has that."""
        several = any(len(scores.protocol.scales) > 1 for _, scores in self.counted)
        return paper_row(self.config, several)

    def beyond(self, kind: str) -> dict[str, Average | None]:
        """Give the mean mIoU by fault (``"stress"``) or split (``"splits"``), that without first, of the same runs."""
        tested = [scores for _, scores in self.counted if getattr(scores, kind)]
        own = "none" if kind == "stress" else tested[0].split
        return {own: Average.of(scores.miou for scores in tested), **getattr(self, kind)}

    @property
    def images_per_second(self) -> float | None:
        speeds = [run.images_per_second for run in self.runs if run.images_per_second is not None]
        return median(speeds) if speeds else None

    @property
    def training_time(self) -> timedelta | None:
        """Tell how long its first run took so far, by the speed of all; None if that is not known."""
        run, speed = self.runs[0], self.images_per_second
        return timedelta(seconds=round(run.step * run.config.train.batch_size / speed)) if speed else None


class Comparison:
    """Puts rows of runs beside the baseline. Spreads are sample standard deviations over seeds.

    Gains are taken seed by seed: runs with the same seed saw the same images in the same order.

    Args:
        rows: the name to show → its runs, measured or not.
        baseline: the row that the others are compared with; without it the first that has a result and does not see
            depth, or the first that has a result.
    """

    def __init__(self, title: str, rows: Mapping[str, Sequence[Run]], baseline: str | None = None) -> None:
        self.title = title
        counted = {name: _measured_alike(runs) for name, runs in rows.items()}
        for name, measured_alike in counted.items():
            _require_seeds(name, [run for run, _ in measured_alike])
        if baseline is None:
            found = [name for name in rows if counted[name]] or list(rows)
            baseline = next((name for name in found if not rows[name][0].config.model.sees_depth), found[0])
        first = counted[baseline]
        self.rows = []
        for name, runs in rows.items():
            measured = [scores for _, scores in counted[name]]
            means = {score: Average.of(getattr(each, score) for each in measured) for score in SCORES}
            classes = dict.fromkeys(key for each in measured for key in each.iou)
            iou = {
                key: Average.of(value for each in measured if (value := each.iou.get(key)) is not None)
                for key in classes
            }
            stress, splits = (_means([getattr(each, name) for each in measured]) for name in BEYOND)
            gain = _gain(counted[name], first, alone=len(runs) == len(rows[baseline]) == 1)
            late = Average.of(added for run, _ in counted[name] if (added := run.last_quarter) is not None)
            self.rows.append(Compared(name, tuple(runs), counted[name], means, iou, gain, stress, splits, late))
        self.baseline = next(row for row in self.rows if row.name == baseline)

    def to_dict(self) -> dict[str, Any]:
        """Give what the results.json of a study holds."""
        return {
            "title": self.title,
            "rows": [
                {
                    "name": row.name,
                    **{name: _summary(average) for name, average in row.scores.items()},
                    "gain": _summary(row.gain, tested=row is not self.baseline),
                    "last_quarter": _summary(row.last_quarter),
                    **{
                        name: {key: _summary(average) for key, average in found.items()}
                        for name in BEYOND
                        if (found := getattr(row, name))
                    },
                    "runs": {run.config.train.seed: run.to_dict() for run in row.runs if run.scores is not None},
                }
                for row in self.rows
                if row.counted
            ],
        }


def read_results(path: Path, plan: Plan) -> dict[PlannedRun, Run]:
    """Read what the runs of ``plan`` reached from a results.json; refuse other settings, and to forget any result."""
    if not path.is_file():
        return {}
    content = read_json(path)
    try:
        rows = {row["name"]: row["runs"] for row in content["rows"]}
        kept = {
            (name, int(seed)): Run.from_dict(run, path.parent)
            for name, runs in rows.items()
            for seed, run in runs.items()
        }
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


def _measured_alike(runs: Sequence[Run]) -> tuple[tuple[Run, Scores], ...]:
    found = [(run, run.scores) for run in runs if run.scores is not None]
    most = Counter((scores.setting, scores.step) for _, scores in found).most_common(1)
    return tuple((run, scores) for run, scores in found if (scores.setting, scores.step) == most[0][0])


def _require_seeds(name: str, runs: Sequence[Run]) -> None:
    """Refuse runs of one row that have the same seed: means and tests would take them for independent ones."""
    folders: dict[int, Path] = {}
    for run in runs:
        seed = run.config.train.seed
        if seed in folders:
            raise ValueError(
                f"{name!r} has two runs of seed {seed}, {folders[seed]} and {run.folder}; give each a row of its own, "
                "or leave one out"
            )
        folders[seed] = run.folder


def _gain(own: Sequence[tuple[Run, Scores]], first: Sequence[tuple[Run, Scores]], alone: bool) -> Average | None:
    """Compare the mIoU of ``own`` with that of ``first`` seed by seed, whatever their seeds if both are ``alone``."""
    if not own or not first:
        return None
    (_, mine), (_, theirs) = own[0], first[0]
    ended = all(scores.step is None or scores.step >= run.config.train.steps for run, scores in (*own, *first))
    if mine.setting != theirs.setting or not (mine.step == theirs.step or ended):
        return None
    return Average.of(
        scores.miou - other.miou
        for run, scores in own
        for against, other in first
        if alone or run.config.train.seed == against.config.train.seed
    )


def _means(each: Sequence[Mapping[str, float]]) -> dict[str, Average | None]:
    """Average over runs by name; a run that lacks a name does not count there."""
    names = dict.fromkeys(name for found in each for name in found)
    return {name: Average.of(found.get(name, math.nan) for found in each) for name in names}


def _summary(average: Average | None, tested: bool = False) -> dict[str, Any] | None:
    """Give what results.json says of an average, without what there is not; ``tested`` adds interval and p-value."""
    if average is None:
        return None
    test = {"interval": average.interval, "p": average.p_value} if tested else {}
    return {name: value for name, value in (average._asdict() | test).items() if value is not None}
