"""Reads what a run reached from its folder or from the results.json of its study."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from malleable.data.open import open_dataset
from malleable.data.sample import SampleDataset
from malleable.models.cost import Cost, measure
from malleable.models.depth_input import input_names
from malleable.models.foreign import DEEPLAB, Unavailable
from malleable.runs.config import Config, ModelConfig, build_network
from malleable.runs.folder import SETTINGS, essence, read_config
from malleable.runs.log import ReceptiveField, read_log, validations
from malleable.runs.scores import BEYOND, RESULTS, SCORES, Protocol, Scores


@dataclass(frozen=True)
class Run:
    """Tells what a run reached, and how it came there.

    Args:
        folder: where it was trained, or where its study keeps what it reached.
        step: the last one that is known of.
        curve: the mIoU of all validations by step.
        receptive_fields: those of the step that ``scores`` are of, by layer.
        dataset: its validation split, or a sentence that says why it cannot be opened here.
        trust: a factory of one's own that it names as its network may be imported.
    """

    folder: Path
    config: Config
    scores: Scores | None = None
    step: int = 0
    curve: Mapping[int, float] = field(default_factory=dict)
    receptive_fields: Mapping[str, ReceptiveField] = field(default_factory=dict)
    images_per_second: float | None = None
    dataset: SampleDataset | str = "it was not opened"
    trust: bool = False

    @property
    def command(self) -> str:
        """Give the command that goes on with it, or once it is finished trains it anew."""
        where = ["--out", "NEW_FOLDER"] if self.finished else ["--out", str(self.folder), "--resume", "auto"]
        return shlex.join(["malleable", "train", "--config", str(self.folder / SETTINGS), *where])

    @property
    def finished(self) -> bool:
        """Tell whether it was measured after its last step, or is not to be; one stopped before goes on with it."""
        if not self.config.train.validate_last and self.step >= self.config.train.steps:
            return True
        return self.scores is not None and (self.scores.step or self.step) >= self.config.train.steps

    @property
    def last_quarter(self) -> float | None:
        """Tell how much mIoU the last quarter of its updates added; None if it was not validated where that began.

        The validation nearest to three quarters counts, if it is within a twentieth of all steps.
        """
        steps = self.config.train.steps
        begun = min(self.curve, key=lambda step: abs(step - 0.75 * steps), default=0)
        if steps not in self.curve or abs(begun - 0.75 * steps) > 0.05 * steps:
            return None
        return self.curve[steps] - self.curve[begun]

    @property
    def cost(self) -> Cost | None:
        """Count what one image of the size that training crops costs.

        None if the number of classes is not known, or the network cannot be built here.
        """
        if not isinstance(self.dataset, str):
            classes = len(self.dataset.classes)
        elif self.scores is not None and self.scores.source == RESULTS:
            classes = len(self.scores.iou)
        else:
            return None
        return _cost(self.config.model, classes, self.config.data.crop, self.trust)

    def to_dict(self) -> dict[str, Any]:
        """Give what the results.json of a study holds of a run that has scores."""
        columns = (learned.columns(layer) for layer, learned in self.receptive_fields.items())
        return {
            **{name: getattr(self.scores, name) for name in SCORES},
            "iou": dict(self.scores.iou) if self.scores is not None else {},
            **(self.scores.beyond() if self.scores is not None else {}),
            "curve": dict(self.curve),
            "receptive_field": {name: value for fields in columns for name, value in fields.items()},
            "images_per_second": self.images_per_second,
            "settings": self.config.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], folder: Path) -> Run:
        """Read what :meth:`to_dict` gave."""
        config = Config.from_dict(values["settings"])
        scores = _validated({name: values[name] for name in SCORES}, values["iou"], config, config.train.steps)
        return cls(
            folder,
            config,
            replace(scores, **{name: values.get(name, {}) for name in BEYOND}),
            config.train.steps,
            {int(step): value for step, value in values["curve"].items()},
            ReceptiveField.by_layer(values["receptive_field"]),
            values["images_per_second"],
        )


def read_training(folder: Path, config: Config, dataset: SampleDataset | str | None = None) -> Run:
    """Read what the log of a run tells; the scores call its data by the name of its folder.

    ``dataset`` is its validation split if it is open already; else it is opened only to see whose faults were measured.
    """
    rows = read_log(folder)
    last = next((row for row in reversed(rows) if row.miou is not None), None)
    results = None if last is None else own_results(folder, config, last.step, dataset)
    beyond: dict[str, Any] = {} if results is None else results.beyond()
    learned = {row.step: row.receptive_fields for row in rows if row.receptive_fields}
    speeds = [speed for row in rows if (speed := row.training.get("images_per_second")) is not None]
    return Run(
        folder,
        config,
        None if last is None else replace(_validated(last.scores, last.iou, config, last.step), **beyond),
        max((row.step for row in rows), default=0),
        validations(rows),
        {} if last is None else learned.get(last.step, {}),
        median(speeds) if speeds else None,
    )


def read_run(folder: Path, evaluated: bool = True, trust: bool = False) -> Run:
    """Read a run from its folder, finished or not. Nothing in its files is executed.

    Its scores are those of results.json if ``evaluated`` and no later step was validated, else of the last validation.
    """
    if not (folder / SETTINGS).is_file():
        raise FileNotFoundError(f"{folder} holds no run ({SETTINGS} is missing); give a folder that training made")
    config = read_config(folder)
    dataset = _open(config)
    run = read_training(folder, config, dataset)
    name = Path(config.data.root).name if isinstance(dataset, str) else dataset.name
    scores = None if run.scores is None else replace(run.scores, dataset=name)
    if evaluated and (folder / RESULTS).is_file():
        results = Scores.read(folder / RESULTS)
        later = scores is not None and results.step is not None and (scores.step or 0) > results.step
        scores = scores if later else results
    step = max(run.step, (scores.step or 0) if scores is not None else 0)
    return replace(run, scores=scores, step=step, dataset=dataset, trust=trust)


def _open(config: Config) -> SampleDataset | str:
    """Open the validation split of a run, or say why that cannot be done here."""
    try:
        return open_dataset(config.data.root, config.data.val)
    except (ValueError, OSError) as error:
        return str(error)


def own_results(folder: Path, config: Config, step: int, dataset: SampleDataset | str | None = None) -> Scores | None:
    """Read what ``malleable evaluate`` wrote after ``step``; None if it was not asked.

    What it found on other data than the run's own validation, or in another way, does not count.
    """
    if not (folder / RESULTS).is_file():
        return None
    results = Scores.read(folder / RESULTS)
    if (results.step, results.split, results.protocol) != (step, config.data.val, Protocol()):
        return None
    dataset = _open(config) if dataset is None else dataset
    return results if isinstance(dataset, str) or dataset.name == results.dataset else None


def _validated(scores: Mapping[str, float], iou: Mapping[str, float], config: Config, step: int) -> Scores:
    miou, pixels, classes = (scores.get(name, math.nan) for name in SCORES)
    data = config.data
    return Scores(miou, pixels, classes, iou, data.root, data.val, Protocol(), step, "last validation")


def grouped(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Put runs together that learn alike but for their seed, by the name of their method, unlike all others.

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

    return {name(members[0]): members for members in seeds.values()}


def method_name(model: ModelConfig) -> str:
    """Name the method as tables do."""
    conv = {"conv25d": f"2.5D K={model.kernels}", "malleable": f"malleable K={model.kernels}"}
    parts = [] if model.conv is None else [conv.get(model.conv, "depth-aware")]
    name = " + ".join([*parts, *input_names(model.depth_input, model.depth_encoder)]) or "RGB baseline"
    return f"{name}, smoothed depth" if model.smooth_depth and model.sees_depth else name


@cache
def _cost(model: ModelConfig, classes: int, size: tuple[int, int], trust: bool) -> Cost | None:
    try:
        with torch.device("meta" if model.network == DEEPLAB else "cpu"):  # some read numbers from tensors they make
            net = build_network(model, classes, pretrained=False, trust=trust)
        return measure(net, size)
    except (Unavailable, RuntimeError):  # of a foreign network that looks at numbers, which are not there to count it
        return None
