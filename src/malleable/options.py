"""What the command line adds to jsonargparse: files that build on others, and the nearest name for an unknown one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

BASE = "base"
"""The key of a YAML file that names the file it builds on, relative to its own folder."""


class UsageError(ValueError):
    """The command was called wrongly."""


def resolve(arguments: Sequence[str], types: Mapping[str, Any]) -> list[str]:
    """``arguments`` with every ``--config FILE`` replaced by the settings of that file and of those it builds on.

    Args:
        types: of the command's parameters; those of a dataclass are options of their own, ``--train.lr``.
    """
    known = list(_names(types))
    left, result = list(arguments), []
    while left:
        argument = left.pop(0)
        name, equals, value = argument.partition("=")
        if name == "--config":
            if not equals and not left:
                raise UsageError("--config needs a YAML file")
            settings = read_settings(Path(value if equals else left.pop(0)))
            require_known(settings, types)
            result.append(f"--config={json.dumps(settings, ensure_ascii=False)}")
            continue
        if name.startswith("--") and name not in ("--help", "--print_config"):
            _require_known(name.removeprefix("--"), known)
        result.append(argument)
    return result


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a YAML file over those of its ``base``. Nothing in the files is executed."""
    return _read(path, ())


def require_known(settings: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Raise if ``settings`` name anything that is not among ``types``, with the nearest name."""
    known = list(_names(types))
    for key in _keys(settings):
        _require_known(key, known)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of ``over`` on top of ``base``, section by section."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = merged(base[key], value) if both else value
    return result


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    from jsonargparse import get_loader  # PyYAML's safe loader, with numbers such as 1e-4

    if path.resolve() in above:
        raise UsageError(f"{path} builds on itself: {' → '.join(map(str, (*above, path.resolve())))}")
    if not path.is_file():
        raise UsageError(f"--config: there is no file {path}" + (f", the base of {above[-1]}" if above else ""))
    try:
        text = path.read_text(encoding="utf-8")
        settings = get_loader("yaml")(text)
    except Exception as error:  # whatever the loader's library raises
        raise UsageError(f"--config: {path} is no plain YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise UsageError(f"--config: {path} must hold settings by name, got a {type(settings).__name__}")
    _require_once(text, path)
    base = settings.pop(BASE, None)
    if base is None:
        return settings
    if not isinstance(base, str):
        raise UsageError(f"--config: {BASE!r} in {path} must name one file, got {base!r}")
    return merged(_read(path.parent / base, (*above, path.resolve())), settings)


def _require_once(text: str, path: Path) -> None:
    """Raise if a section has two entries of one name, of which YAML's loader would drop the first."""
    import yaml  # type: ignore[import-untyped]  # comes with jsonargparse

    nodes, seen = [yaml.compose(text, Loader=yaml.SafeLoader)], set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:  # again, by an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            nodes += [value for _, value in node.value]
            names = [key.value for key, _ in node.value]
            twice = [name for name in names if names.count(name) > 1 and name != "<<"]
            if twice:
                raise UsageError(f"--config: {path} has {twice[0]!r} more than once in a section; leave only one")


def _names(types: Mapping[str, Any]) -> Iterator[str]:
    for name, kind in types.items():
        if name != "return":
            yield name
            if is_dataclass(kind):
                yield from (f"{name}.{item}" for item in _names(_field_types(kind)))


def _field_types(kind: Any) -> dict[str, Any]:
    types = get_type_hints(kind)
    return {item.name: types[item.name] for item in fields(kind)}


def _keys(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in settings.items():
        if "." in str(key):  # could not be merged with the section of another file
            section, _, rest = str(key).partition(".")
            raise UsageError(f"write the setting {key!r} as a section, {section}: {{{rest}: ...}}")
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _require_known(name: str, known: Sequence[str]) -> None:
    if name.replace("-", "_") in known:
        return
    ends = {option.rpartition(".")[2]: option for option in reversed(known)}
    near = get_close_matches(name, known, n=1) or [ends[end] for end in get_close_matches(name, ends, n=1)]
    raise UsageError(f"unknown setting {name!r}{f', did you mean {near[0]!r}?' if near else ''}")
