"""What a study is made of: rows of settings, each trained with several seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from malleable.config import Config
from malleable.options import UsageError, merged, read_settings, require_known


@dataclass(frozen=True)
class Run:
    """One training: a row of the study with one seed."""

    row: str
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        """Of this run, inside the study's."""
        return Path(slug(self.row)) / f"seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.row}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """A study. ``runs`` has every row with its first seed, then with its second, so that what is done can be compared;
    rows with fewer seeds come last.

    ``out`` is the folder of the runs, ``record`` that of the results; None is the same folder.
    """

    title: str
    intro: str
    out: str
    record: str | None
    rows: tuple[str, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class _File:
    """The YAML: ``settings`` of all rows, and by its name what each row changes in them, ``seeds`` included."""

    title: str
    out: str
    rows: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    seeds: tuple[int, ...] = (0, 1, 2)
    intro: str = ""
    record: str | None = None


def read_plan(path: Path, steps: int | None = None) -> Plan:
    """The study in a YAML file, which may build on others with ``base``.

    Args:
        steps: updates of every run, instead of what the file says.
    """
    file = _parse(path, _File, read_settings(path))
    if len({slug(name) for name in file.rows}) < len(file.rows) or not all(map(slug, file.rows)):
        raise UsageError(f"{path}: the rows need names that differ in letters or digits, got {', '.join(file.rows)}")
    runs: list[tuple[int, int, Run]] = []
    for name, row in file.rows.items():
        row = dict(row or {})
        seeds = row.pop("seeds", file.seeds)
        settings = merged(file.settings, row)
        require_known(settings, get_type_hints(Config))
        config = _parse(path, Config, settings)
        for place, seed in enumerate(seeds):
            recipe = replace(config.train, seed=seed, **({} if steps is None else {"steps": steps}))
            runs.append((-len(seeds), place, Run(name, seed, replace(config, train=recipe))))
    if not runs:
        raise UsageError(f"{path} has no run: give it rows and seeds")
    ordered = tuple(run for _, _, run in sorted(runs, key=lambda entry: entry[:2]))
    return Plan(file.title, file.intro, file.out, file.record, tuple(file.rows), ordered)


def share(runs: tuple[Run, ...], only: str | None) -> tuple[Run, ...]:
    """Every n-th of ``runs``, from the i-th on, for ``only`` = "i/n"; all for None."""
    if only is None:
        return runs
    found = re.fullmatch(r"(\d+)/(\d+)", only)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(f"only must be i/n with i from 1 to n, for example 2/3, got {only!r}")
    return runs[int(found[1]) - 1 :: int(found[2])]


def slug(name: str) -> str:
    """A name for files: lower case letters and digits, joined by dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _parse(path: Path, kind: Any, values: Mapping[str, Any]) -> Any:
    """``values`` checked against the types of the dataclass ``kind``, as the command line does."""
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--study", type=kind)
    try:
        parsed = parser.parse_object({"study": values}).study.as_dict()
    except ArgumentError as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from error
    return Config.from_dict(parsed) if kind is Config else kind(**parsed)
