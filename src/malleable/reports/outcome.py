"""What runs came to: settings, figures, speed and cost, as their folders tell."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median

import torch

from malleable.data.open import open_dataset
from malleable.data.sample import SampleDataset
from malleable.models.cost import Cost, measure
from malleable.reports.statistics import Average
from malleable.runs.config import Config, ModelConfig, build_network
from malleable.runs.folder import SETTINGS, essence, read_config
from malleable.runs.log import Row, read_log
from malleable.runs.scores import RESULTS, SCORES, Protocol, Scores


@dataclass(frozen=True)
class Run:
    """One run. ``dataset`` is its validation split, or a sentence that says why it cannot be opened here."""

    folder: Path
    config: Config
    yaml: str
    dataset: SampleDataset | str
    measured: Scores | None
    step: int
    images_per_second: float | None

    @property
    def command(self) -> str:
        """What goes on with it, or once it is finished trains it anew."""
        where = ["--out", "NEW_FOLDER"] if self.finished else ["--out", str(self.folder), "--resume", "auto"]
        return shlex.join(["malleable", "train", "--config", str(self.folder / SETTINGS), *where])

    @property
    def finished(self) -> bool:
        """Whether it was measured after its last step, or is not to be; one that was stopped before goes on with it."""
        if not self.config.train.validate_last and self.step >= self.config.train.steps:
            return True
        measured = None if self.measured is None else self.measured.step or self.step
        return measured is not None and measured >= self.config.train.steps

    @property
    def budget(self) -> str:
        recipe, (height, width) = self.config.train, self.config.data.crop
        return f"{recipe.steps} steps × {recipe.batch_size} images of {height}×{width}"

    @property
    def cost(self) -> Cost | None:
        """Of one image of the size that training crops; None if the number of classes is not known."""
        if not isinstance(self.dataset, str):
            classes = len(self.dataset.classes)
        elif self.measured is not None and self.measured.source == RESULTS:
            classes = len(self.measured.iou)
        else:
            return None
        return _cost(self.config.model, classes, self.config.data.crop)


@dataclass(frozen=True)
class Group:
    """Runs that are shown as one, usually several seeds of a method."""

    name: str
    runs: tuple[Run, ...]

    @property
    def config(self) -> Config:
        return self.runs[0].config

    @cached_property
    def counted(self) -> list[tuple[Run, Scores]]:
        """Its runs that were measured alike and after as many steps, with their figures: the largest such set."""
        found = [(run, run.measured) for run in self.runs if run.measured is not None]
        most = Counter((each.setting, each.step) for _, each in found).most_common(1)
        return [(run, each) for run, each in found if (each.setting, each.step) == most[0][0]]

    @property
    def measured(self) -> list[Scores]:
        return [each for _, each in self.counted]

    @property
    def setting(self) -> str | None:
        return self.measured[0].setting if self.measured else None

    def average(self, figure: Callable[[Scores], float | None]) -> Average | None:
        """Of a figure of its runs; None if no run has it."""
        return Average.of(value for each in self.measured if (value := figure(each)) is not None)

    @property
    def miou(self) -> Average | None:
        return self.average(lambda measured: measured.miou)

    @property
    def _step(self) -> int | None:
        return self.measured[0].step if self.measured else None

    @property
    def _complete(self) -> bool:
        """Whether its figures are those of the end of training, as far as is known."""
        return all(each.step is None or each.step >= run.config.train.steps for run, each in self.counted)

    @property
    def seeds(self) -> set[int]:
        """Of the runs that its figures are from."""
        return {run.config.train.seed for run, _ in self.counted}

    def ahead(self, other: Group) -> Average | None:
        """How far its mIoU is above that of ``other``, over the seeds that both have, or of one run each.

        None if there is no such pair, or if the two were not measured alike, at the same step or the end of training.
        """
        if self.setting != other.setting or not (self._step == other._step or (self._complete and other._complete)):
            return None
        alone = len(self.counted) == len(other.counted) == 1
        return Average.of(
            mine.miou - theirs.miou
            for run, mine in self.counted
            for against, theirs in other.counted
            if alone or run.config.train.seed == against.config.train.seed
        )

    @property
    def images_per_second(self) -> float | None:
        speeds = [run.images_per_second for run in self.runs if run.images_per_second is not None]
        return median(speeds) if speeds else None


def read_run(folder: Path, evaluated: bool = True) -> Run:
    """A run from its folder, finished or not. Nothing in its files is executed.

    Its figures are those of results.json if ``evaluated`` and no later step was validated, else of the last validation.
    """
    path = folder / SETTINGS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run ({SETTINGS} is missing); give a folder that training made")
    config = read_config(folder)
    try:
        dataset: SampleDataset | str = open_dataset(config.data.root, config.data.val)
    except (ValueError, OSError) as error:
        dataset = str(error)
    rows = read_log(folder)
    results = folder / RESULTS
    measured = Scores.read(results) if evaluated and results.is_file() else None
    validated = _last_validation(rows, config, dataset)
    if measured is None or (validated is not None and _later(validated, measured)):
        measured = validated
    steps = [row.step for row in rows] + [measured.step or 0 if measured is not None else 0]
    speeds = [speed for row in rows if (speed := row.training.get("images_per_second")) is not None]
    return Run(folder, config, path.read_text(encoding="utf-8"), dataset, measured, max(steps),
               median(speeds) if speeds else None)  # fmt: skip


def grouped(runs: Iterable[Run]) -> list[Group]:
    """Runs that learn alike but for their seed together, each group by the name of its method, unlike all others.

    A run with the seed of another is no further seed: it goes to a group of its own.
    """
    seeds: dict[tuple[Config, int], list[Run]] = {}
    copies: Counter[Config] = Counter()
    for run in runs:
        learned = essence(run.config)
        method = replace(learned, train=replace(learned.train, seed=0))
        seeds.setdefault((method, copies[learned]), []).append(run)
        copies[learned] += 1
    methods = Counter(method_name(config.model) for config, _ in seeds)
    folders = Counter(members[0].folder.name for members in seeds.values())

    def name(run: Run) -> str:
        method, folder = method_name(run.config.model), run.folder
        if methods[method] == 1:
            return method
        return f"{method} ({folder.name if folders[folder.name] == 1 else folder})"

    return [Group(name(members[0]), tuple(members)) for members in seeds.values()]


def method_name(model: ModelConfig) -> str:
    """In short, as tables name it."""
    several = {"conv25d": "2.5D", "malleable": "malleable"}
    if model.conv is None:
        return "RGB baseline"
    return f"{several[model.conv]} K={model.kernels}" if model.conv in several else "depth-aware"


def _later(one: Scores, other: Scores) -> bool:
    """Whether it is known to be of a later step."""
    return one.step is not None and other.step is not None and one.step > other.step


def _last_validation(rows: Sequence[Row], config: Config, dataset: SampleDataset | str) -> Scores | None:
    row = next((row for row in reversed(rows) if row.miou is not None), None)
    if row is None:
        return None
    miou, pixels, classes = (row.scores.get(name, math.nan) for name in SCORES)
    name = Path(config.data.root).name if isinstance(dataset, str) else dataset.name
    return Scores(miou, pixels, classes, row.iou, name, config.data.val, Protocol(), row.step, "last validation")


@cache
def _cost(model: ModelConfig, classes: int, size: tuple[int, int]) -> Cost:
    with torch.device("meta"):
        net = build_network(model, classes, pretrained=False)
    return measure(net, size)
