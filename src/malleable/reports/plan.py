"""Reads what a study is made of: rows of settings, each trained with several seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from malleable.data.faults import chosen_stresses
from malleable.models.backbone import require_backbone
from malleable.models.foreign import DEEPLAB, require_network
from malleable.runs.config import Config, TrainConfig, parse_config
from malleable.runs.settings import UsageError, checked, merged, read_settings


@dataclass(frozen=True)
class PlannedRun:
    """Describes one training: a row of the study with one seed."""

    row: str
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        """Tell where it is trained, inside the study's folder."""
        return Path(slug(self.row)) / f"seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.row}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """Describes a study. ``out`` is the folder of the runs, ``record`` that of the results; None is the same folder.

    With ``stress`` each run is tested with faults of depth once it is trained: with ``faults``, or with all if that is
    empty; and on the splits ``also``. ``runs`` has every row with its first seed, then with its second, so that what is
    done can be compared; rows with fewer seeds come last.
    """

    title: str
    intro: str
    out: str
    record: str | None
    rows: tuple[str, ...]
    runs: tuple[PlannedRun, ...]
    stress: bool = False
    faults: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class _File:
    """The YAML has ``settings`` of all rows, and by its name what each row changes in them, ``seeds`` included."""

    title: str
    out: str
    rows: dict[str, dict[str, Any] | None]
    settings: dict[str, Any]
    seeds: tuple[int, ...] = (0, 1, 2)
    intro: str = ""
    record: str | None = None
    stress: bool = False
    faults: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


def read_plan(path: Path, steps: int | None = None) -> Plan:
    """Read the study in a YAML file, which may build on others with ``base``.

    Args:
        steps: updates of every run, instead of what the file says; it is validated as often as with those.
    """
    try:
        settings = read_settings(path)
    except UsageError as error:
        raise UsageError(str(error).removeprefix("--config: ")) from error
    file = _parse(str(path), _File, settings)
    folders: dict[str, str] = {}
    for name in file.rows:
        if not isinstance(name, str):
            raise UsageError(f"{path}: names of rows must be text, got {name!r}; put it in quotes")
        if not slug(name):
            raise UsageError(f"{path}: names of rows need a letter or digit, got {name!r}")
        other = folders.setdefault(slug(name), name)
        if other != name:
            need = "must differ in letters or digits, whatever their case"
            raise UsageError(f"{path}: names of rows {need}, got {other!r} and {name!r}")
    runs: list[tuple[int, int, PlannedRun]] = []
    for name, row in file.rows.items():
        row, where = dict(row or {}), f"{path}, row {name!r}"
        seeds = _checked_seeds(where, row.pop("seeds", file.seeds))
        settings = merged(file.settings, row)
        config = _parse(where, Config, settings)
        if "seed" in settings.get("train", {}):
            raise UsageError(f"{where}: train.seed is set, but each run gets one of seeds; leave it out")
        if not config.train.validate_last:
            raise UsageError(f"{where}: train.validate_last is off, but a study reports that validation; leave it on")
        recipe = config.train if steps is None else _shortened(config.train, steps)
        for place, seed in enumerate(seeds):
            planned = PlannedRun(name, seed, replace(config, train=replace(recipe, seed=seed)))
            runs.append((-len(seeds), place, planned))
    if not runs:
        raise UsageError(f"{path} has no run: give it rows and seeds")
    ordered = tuple(run for _, _, run in sorted(runs, key=lambda entry: entry[:2]))
    try:
        faults = tuple(fault.name for fault in chosen_stresses(file.faults)) if file.faults else ()
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    if faults and not file.stress:
        raise UsageError(f"{path}: faults has no effect without stress: true; add it, or leave faults out")
    return Plan(
        file.title, file.intro, file.out, file.record, tuple(file.rows), ordered, file.stress, faults, file.also
    )


def _shortened(recipe: TrainConfig, steps: int) -> TrainConfig:
    every = recipe.validate_every and max(1, round(recipe.validate_every * steps / recipe.steps))
    return replace(recipe, steps=steps, validate_every=every)


def part(runs: tuple[PlannedRun, ...], only: str | None) -> tuple[PlannedRun, ...]:
    """Take every n-th of ``runs``, from the i-th on, for ``only`` = "i/n"; all for None."""
    if only is None:
        return runs
    found = re.fullmatch(r"(\d+)/(\d+)", only)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(f"only must be i/n with i from 1 to n, for example 2/3, got {only!r}")
    return runs[int(found[1]) - 1 :: int(found[2])]


def slug(name: str) -> str:
    """Make a name for files: lower case letters and digits of any language, joined by dashes."""
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")


def _checked_seeds(where: str, seeds: Any) -> tuple[int, ...]:
    """Give back ``seeds`` if they are different whole numbers, at least one."""
    if not isinstance(seeds, list | tuple) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise UsageError(f"{where}: seeds must be a list of whole numbers from 0 on, at least one, got {seeds!r}")
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"{where}: seeds must differ from each other, got {seeds!r}")
    return tuple(seeds)


def _parse(where: str, kind: Any, values: Mapping[str, Any]) -> Any:
    """Make a ``kind`` of ``values``, as the command line does."""
    try:
        if kind is not Config:
            return kind(**checked(kind, values))
        config = parse_config(values)
        model = config.model  # looked at now, not when the row's turn comes
        if model.network == DEEPLAB:
            require_backbone(model.backbone)
        else:
            require_network(model.network, model.options)
        return config
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error
