"""What the command line adds to jsonargparse: files that build on others, and answers of one line to what is wrong."""

from __future__ import annotations

import json
import re
import shlex
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import reduce
from itertools import islice, takewhile
from operator import itemgetter
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, get_args, get_origin, get_type_hints

_BASE = "base"
"""This key of a YAML file names the file it builds on, relative to its own folder."""

_MOST_NODES = 10_000
"""No file may hold more values and sections, aliases written out: a few lines can stand for millions."""

AGAIN = ("--resume", "auto")
"""These words end the first line of the settings that a run wrote: the command that goes on with it."""

_OWN = ("-h", "--help", "--print_config")
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "null",
}
_MANY = {int: "whole numbers", float: "numbers"}


class UsageError(ValueError):
    """Says that the command was called wrongly."""


def resolve(words: Sequence[str], types: Mapping[str, Any]) -> list[str]:
    """Bring a command line into jsonargparse's words: all settings as one ``--config``, then what has no flag.

    A file counts as its settings and those it builds on, ``--json`` as ``--json true``, ``--size 9 9`` as
    ``--size [9,9]``, a dash in a name as an underscore, and where a command takes a list of things without a flag, they
    are that list; if its first parameter is a tuple, there may be none of them. In whatever order they are said, a
    setting goes before its section, and both before ``--config``; of two alike the later one. Parameters in ``types``
    that are dataclasses have options, ``--train.lr``. A run's own settings are refused if their ``out`` is not where
    they lie, unless another is said.
    """
    known = flat(types)
    left = deque(words)
    said: list[tuple[int, dict[str, Any]]] = []  # how far down it is, and what
    astray: dict[str, Path] = {}  # out → a run's own settings that say it and lie elsewhere
    own: list[str] = []
    plain: list[str] = []
    while left:
        word = left.popleft()
        name, equals, text = word.partition("=")
        option = name.removeprefix("--")
        if option.replace("-", "_") in known:
            option = option.replace("-", "_")
        if word == "--":  # no flags after it
            own.append(word)
            plain += left
            break
        if name in _OWN or not _is_flag(word):
            (own if name in _OWN else plain).append(word)
            continue
        kind = known.get(option, Any if _is_entry(option, known) else None)
        if option == name or (kind is None and option != "config"):
            raise _unknown(option, known)
        value: Any = text if equals else _take(left, kind)
        if option == "config" or is_dataclass(kind):
            if not value:
                raise UsageError(f"{name} needs a YAML file")
            file = None if value.startswith("{") else Path(value)
            value = _load(value, name) if file is None else read_settings(file, name)
            if file is not None and _lies_elsewhere(file, value):
                astray[value["out"]] = file
        elif value is None:
            raise UsageError(_wrong(option, kind, ""))
        elif value and (kind is Any or get_origin(kind) is dict):  # an empty word is text, which YAML would call null
            value = _value(value, name)
        names = [] if option == "config" else option.split(".")
        for section in reversed(names):
            value = {section: value}
        require_known(value, types)
        said.append((len(names), value))
    settings: dict[str, Any] = reduce(merged, (value for _, value in sorted(said, key=itemgetter(0))), {})
    if settings.get("out") in astray and all("out" not in value for depth, value in said if depth):
        raise _astray(astray[settings["out"]], settings["out"])
    first, kind = next(iter(known.items()), ("", None))
    if get_origin(kind) is tuple and plain:
        settings, plain = merged(settings, {first: plain}), []
    place = next((place for place, kind in enumerate(known.values()) if get_origin(kind) is list), len(plain))
    if plain[place:]:
        plain[place:] = [json.dumps(plain[place:], ensure_ascii=False)]
    return [f"--config={json.dumps(settings, ensure_ascii=False)}", *own, *plain]


def written_by_run(path: Path) -> bool:
    """Tell whether a run wrote these settings under this name, by their first line."""
    command = path.read_bytes().split(b"\n", 1)[0].rstrip().replace(b"'", b"")  # a path with spaces is in quotes
    return command.endswith(" ".join((path.name, *AGAIN)).encode())


def _lies_elsewhere(path: Path, settings: Mapping[str, Any]) -> bool:
    """Tell whether a run wrote these settings and their ``out``, seen from here, is not their folder."""
    out = settings.get("out")
    return isinstance(out, str) and Path(out).resolve() != path.resolve().parent and written_by_run(path)


def _astray(path: Path, out: str) -> UsageError:
    folder = path.resolve().parent
    return UsageError(
        f"{path} is of a run in {Path(out).resolve()}, but lies in {folder}: it was moved, or begun in another working "
        f"directory; add --out {shlex.quote(str(path.parent))} to go on with it"
    )


def _is_entry(option: str, known: Mapping[str, Any]) -> bool:
    """Tell whether ``option`` names an entry of settings that may have any name, as model.options.encoder_name does."""
    return get_origin(known.get(option.rpartition(".")[0])) is dict


def _is_flag(word: str) -> bool:
    return re.match("--?[A-Za-z]", word) is not None


def _take(left: deque[str], kind: Any) -> str | None:
    """Take the value of an option of type ``kind`` off the words that are ``left``."""
    if kind is bool:
        return left.popleft() if left and left[0] in ("true", "false") else "true"
    lists = [option for option in (kind, *get_args(kind)) if get_origin(option) is tuple]  # tuple or tuple | None
    inner = get_args(lists[0]) if lists else ()
    fits = _is_number if int in inner or float in inner else (lambda word: not word.startswith(("-", "[")))
    values = list(takewhile(fits, islice(left, None if Ellipsis in inner else len(inner))))
    alone = get_origin(kind) is not tuple and str in get_args(kind)  # one word or several
    if len(values) > 1 or (values and Ellipsis in inner and not alone):
        for _ in values:
            left.popleft()
        return f"[{','.join(values)}]" if fits is _is_number else json.dumps(values)  # globs are no YAML
    return left.popleft() if left and not _is_flag(left[0]) else "true" if bool in get_args(kind) else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_settings(path: Path, option: str = "--config", above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read the settings of a YAML file over those of its ``base``. Nothing in the files is executed.

    Errors name the ``option`` that named the file. The files ``above`` build on this one.
    """
    if path.resolve() in above:
        raise UsageError(f"{path} builds on itself: {' → '.join(map(str, (*above, path.resolve())))}")
    if not path.is_file():
        raise UsageError(f"{option}: there is no file {path}" + (f", the base of {above[-1]}" if above else ""))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{option}: {path} is no plain YAML: {error}") from error
    settings = _load(text, f"{option}: {path}")
    base = settings.pop(_BASE, None)
    if base is None:
        return settings
    if not isinstance(base, str):
        raise UsageError(f"{option}: {_BASE!r} in {path} must name one file, got {base!r}")
    return merged(read_settings(path.parent / base, option, (*above, path.resolve())), settings)


def require_known(settings: Mapping[str, Any], types: Mapping[str, Any], prefix: str = "") -> None:
    """Raise if ``settings`` name anything that is not among ``types``, with the nearest name.

    Raises also for what jsonargparse lets pass in a file: sections without names, and null for what cannot be null.
    """
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if "." in str(key):  # could not be merged with the section of another file
            section, _, rest = str(key).partition(".")
            raise UsageError(f"write the setting {name!r} as a section, {prefix}{section}: {{{rest}: ...}}")
        if key not in types:
            raise _unknown(name, [f"{prefix}{known}" for known in flat(types)])
        kind = types[key]
        null = value is None or (value == "null" and kind not in (str, Path))  # a name or a path can be that
        if is_dataclass(kind):
            if not isinstance(value, dict):
                raise UsageError(f"{name} must hold settings by name, got {value!r}")
            require_known(value, _field_types(kind), f"{name}.")
        elif null and kind is not Any and type(None) not in get_args(kind):
            raise UsageError(_wrong(name, kind, "null"))


def checked(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Check ``values`` against the types of the dataclass ``kind`` as the command line does, and add the defaults."""
    from jsonargparse import ArgumentError, ArgumentParser

    types = get_type_hints(kind)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    require_known(values, types)
    try:
        parsed: dict[str, Any] = parser.parse_object(dict(values)).as_dict()
    except ArgumentError as error:
        raise explained(error, types) from error
    return parsed


def explained(error: Exception, types: Mapping[str, Any]) -> UsageError:
    """Say what jsonargparse finds wrong in one line: the setting, what it takes and what it got."""
    message = " ".join(str(error).split())
    found = re.match(r'Parser key "([^"]+)":.* value: ?(.*)', message) or re.match(
        r"argument (?:--)?([^ :]+): expected()", message
    )
    known = flat(types)
    if file := re.search(r"unrecognized arguments: (\S+\.ya?ml)", message):
        return UsageError(f"a file of settings is given as --config {file[1]}")
    if found is None or found[1] not in known:
        return UsageError(shorten(message, 250, placeholder=" …"))
    return UsageError(_wrong(found[1], known[found[1]], found[2]))


def nearest(name: str, known: Iterable[str]) -> str:
    """Ask whether another name was meant; empty if none is like ``name``."""
    known = list(known)
    begun = [other for other in known if name and other.startswith(name.lower())]
    found = begun or get_close_matches(name.lower(), known, n=1)
    return f", did you mean {found[0]!r}?" if found else ""


def flat(types: Mapping[str, Any]) -> dict[str, Any]:
    """Give each option its type, those of a dataclass after it: ``train``, ``train.lr``, …"""
    result = {}
    for name, kind in types.items():
        if name != "return":
            result[name] = kind
            if is_dataclass(kind):
                result.update({f"{name}.{option}": inner for option, inner in flat(_field_types(kind)).items()})
    return result


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay the settings of ``over`` on top of ``base``, section by section."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = merged(base[key], value) if both else value
    return result


def dumped(settings: Mapping[str, Any]) -> str:
    """Write ``settings`` as YAML that is read as the same: text that looks like a number to us, 1e-4, is quoted."""
    import yaml  # type: ignore[import-untyped]  # comes with jsonargparse

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Knows the numbers of our loader."""

    def represent(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, "'" if _is_number(text) else None)

    Dumper.add_representer(str, represent)
    text: str = yaml.dump(dict(settings), Dumper=Dumper, sort_keys=False)
    return text


def _load(text: str, source: str) -> dict[str, Any]:
    """Load the settings of a YAML text of ``source``."""
    from jsonargparse import get_loader  # PyYAML's safe loader, with numbers such as 1e-4

    try:
        _require_plain(text, source)
        settings = get_loader("yaml")(text)
    except UsageError:
        raise
    except Exception as error:  # whatever the loader's library raises
        reason = shorten(" ".join(str(error).split()), 200, placeholder=" …")
        raise UsageError(f"{source} is no plain YAML: {reason}") from error
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise UsageError(f"{source} must hold settings by name, got a {type(settings).__name__}")
    return settings


def _value(text: str, source: str) -> Any:
    """Read a number, list, section, null or quoted text as YAML has it; all else is text, with every , and # in it."""
    value = _load(f"value: {text}", source)["value"]
    if isinstance(value, list | dict) or text.startswith(("'", '"', "!")):
        return value
    return text if isinstance(value, str) or "#" in text else value


def _require_plain(text: str, source: str) -> None:
    """Raise before YAML's loader makes objects of tags, drops the first of two entries, or writes out an alias bomb."""
    import yaml  # comes with jsonargparse

    nodes, seen = [("", yaml.compose(text, Loader=yaml.SafeLoader))], 0
    while nodes:
        name, node = nodes.pop()
        seen += 1
        if seen > _MOST_NODES:
            raise UsageError(f"{source} holds more than {_MOST_NODES} values, aliases written out; settings are few")
        if node is not None and node.tag not in _PLAIN_TAGS:
            value = shorten(node.value, 60) if isinstance(node, yaml.ScalarNode) else "…"
            got = f"{node.tag.replace('tag:yaml.org,2002:', '!!')} {value}"
            raise UsageError(
                f"{source} is no plain YAML: {name or 'it'} must be a number, text (in quotes), list or section, "
                f"got {got}"
            )
        if isinstance(node, yaml.SequenceNode):
            nodes += [(name, value) for value in node.value]
        elif isinstance(node, yaml.MappingNode):
            names = [key.value for key, _ in node.value]
            nodes += [(f"{name}.{key.value}".lstrip("."), value) for key, value in node.value]
            twice = [key for key in names if names.count(key) > 1 and key != "<<"]
            if twice:
                raise UsageError(f"{source} has {twice[0]!r} more than once in a section; leave only one")


def _field_types(kind: Any) -> dict[str, Any]:
    types = get_type_hints(kind)
    return {item.name: types[item.name] for item in fields(kind)}


def _unknown(name: str, known: Iterable[str]) -> UsageError:
    """Make an error with the name that is nearest, by initials or letters: train.lr for train.learning_rate."""
    known = list(known)
    ends = {option.rpartition(".")[2]: option for option in reversed(known)}
    plain = name.lower().replace("-", "_").strip("_")
    end = plain.rpartition(".")[2]
    near = [ends[other] for other in ends if _initials(end) == other or _initials(other) == end]
    near += get_close_matches(plain, known, n=1)
    near += [ends[other] for other in get_close_matches(plain, ends, n=1)]
    return UsageError(f"unknown setting {name!r}{f', did you mean {near[0]!r}?' if near else ''}")


def _initials(name: str) -> str | None:
    words = name.split("_")
    return "".join(word[:1] for word in words) if len(words) > 1 else None


def _wrong(name: str, kind: Any, value: str) -> str:
    *others, last = _alternatives(kind)
    allowed = f"{', '.join(others)} or {last}" if others else last
    got = shorten(value, 80, placeholder=" …") or "nothing"
    return f"{name} must be {allowed}, got {got}{nearest(value, _choices(kind))}"


def _alternatives(kind: Any) -> list[str]:
    """Say in words what a setting of a type takes."""
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return list(map(str, inner))
    if get_origin(kind) in (tuple, list):
        many = f"some of {', '.join(_choices(inner[0]))}" if _choices(inner[0]) else _MANY.get(inner[0], "words")
        return [f"{len(inner)} {many}" if get_origin(kind) is tuple and Ellipsis not in inner else many]
    if get_origin(kind) is dict:
        return ["settings by name"]
    return [word for option in inner for word in _alternatives(option)] or [_WORDS.get(kind, "settings by name")]


def _choices(kind: Any) -> list[str]:
    """List the names that a setting of a type can be."""
    if get_origin(kind) is Literal:
        return [name for name in get_args(kind) if isinstance(name, str)]
    return [name for option in get_args(kind) for name in _choices(option)]
