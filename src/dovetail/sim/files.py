"""Machine files: one TOML file per machine, every constant with its source.

    [host]
    submit_ns = { value = 320, origin = "fitted", note = "A's all-gather and phase tables" }

Owns reading, writing and the shipped files in `machines/`. A bad file raises `MachineError` that names the file, the
place, what was found and what is allowed; an unknown key is an error, so that a typo does not become a default.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from pathlib import Path
from typing import Any

from dovetail.sim.machine import LISTS, NUMBERS, SECTIONS, WORDS, Machine, MachineError, Origin, Source

_FOLDER = Path(__file__).with_name("machines")
_TOP = ("name", "title", "ranks")
_CONSTANT = ("value", "origin", "note")


def names() -> list[str]:
    """The shipped machines."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load(name_or_path: str | os.PathLike[str]) -> Machine:
    """A shipped machine by name, or any machine by the path of its file (one with a slash, or ending in .toml)."""
    text = os.fspath(name_or_path)
    if os.sep in text or text.endswith(".toml"):
        return read(text)
    if text not in names():
        raise MachineError(f"no machine {text!r}; shipped are {', '.join(names())}, or give the path of a .toml file")
    return read(_FOLDER / f"{text}.toml")


def read(path: str | os.PathLike[str]) -> Machine:
    """Reads and checks a machine file."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise MachineError(f"machine file {path}: it cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MachineError(f"machine file {path}: not TOML: {error}") from None
    try:
        return parse(data)
    except MachineError as error:
        raise MachineError(f"machine file {path}: {error}") from None


def parse(data: dict[str, Any]) -> Machine:
    """A machine from the tables of its file."""
    _known("the top level", data, (*_TOP, *SECTIONS))
    for key, wanted in (("name", str), ("title", str), ("ranks", int)):
        if not isinstance(data.get(key), wanted) or isinstance(data.get(key), bool):
            raise MachineError(f"{key} must be {_called(wanted)}, found {data.get(key)!r}")
    sources: dict[str, Source] = {}
    parts: dict[str, Any] = {}
    for section, cls in SECTIONS.items():
        optional = all(f.default is not dataclasses.MISSING for f in dataclasses.fields(cls))
        table = data.get(section, {} if optional else None)
        if not isinstance(table, dict):
            raise MachineError(f"the table [{section}] is missing")
        keys = tuple(f.name for f in dataclasses.fields(cls))
        _known(f"[{section}]", table, keys)
        values = {}
        for f in dataclasses.fields(cls):
            name = f"{section}.{f.name}"
            if f.name not in table:
                if f.default is not dataclasses.MISSING:
                    continue
                raise MachineError(f"[{section}] has no {f.name}; it needs {', '.join(keys)}")
            values[f.name], sources[name] = _constant(name, table[f.name])
        parts[section] = cls(**values)
    return Machine(name=data["name"], title=data["title"], ranks=data["ranks"], sources=sources, **parts)


def _constant(name: str, entry: Any) -> tuple[Any, Source]:
    if not isinstance(entry, dict):
        raise MachineError(f'{name} must be {{ value = .., origin = "..", note = ".." }}, found {entry!r}')
    _known(name, entry, _CONSTANT)
    if missing := [key for key in _CONSTANT if key not in entry]:
        raise MachineError(f"{name} has no {missing[0]}: every constant says where it comes from")
    if entry["origin"] not in list(Origin):
        raise MachineError(f"{name}: origin must be one of {', '.join(Origin)}, not {entry['origin']!r}")
    if not isinstance(entry["note"], str) or not entry["note"].strip():
        raise MachineError(f"{name}: the note must say which table, paper or reasoning it comes from")
    return _value(name, entry["value"]), Source(origin=Origin(entry["origin"]), note=entry["note"])


def _value(name: str, value: Any) -> Any:
    if name in WORDS:
        if value not in list(WORDS[name]):
            raise MachineError(f"{name} must be one of {', '.join(WORDS[name])}, not {value!r}")
        return WORDS[name](value)
    if name in LISTS:
        if not isinstance(value, list) or not all(word in list(LISTS[name]) for word in value):
            raise MachineError(f"{name} must be a list out of {', '.join(LISTS[name])}, not {value!r}")
        return tuple(LISTS[name](word) for word in value)
    whole = NUMBERS[name][1]
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise MachineError(f"{name} must be {_called(int if whole else float)}, found {value!r}")
    try:
        return value if whole else float(value)
    except OverflowError:
        raise MachineError(f"{name} has a number that is far too large") from None


def _known(where: str, table: dict[str, Any], allowed: tuple[str, ...]) -> None:
    for key in table:
        if key not in allowed:
            raise MachineError(f"{where} has no key {key!r}; allowed are {', '.join(allowed)}")


def _called(wanted: type) -> str:
    return {str: "a text", int: "a whole number", float: "a number"}[wanted]


def dump(machine: Machine) -> str:
    """The text of a machine file."""
    lines = [f"name = {_text(machine.name)}", f"title = {_text(machine.title)}", f"ranks = {machine.ranks}"]
    for section, cls in SECTIONS.items():
        written = []
        for f in dataclasses.fields(cls):
            name = f"{section}.{f.name}"
            value = getattr(getattr(machine, section), f.name)
            if name not in machine.sources and value == f.default:
                continue
            source = machine.sources.get(name, Source(origin=Origin.ASSUMED, note="not said"))
            where = f'origin = "{source.origin}", note = {_text(source.note)}'
            written.append(f"{f.name} = {{ value = {_shown(value)}, {where} }}")
        lines += ["", f"[{section}]", *written] if written else []
    return "\n".join(lines) + "\n"


def write(machine: Machine, path: str | os.PathLike[str]) -> Path:
    """Writes a machine file; one that can't be read again is not written."""
    text = dump(machine)
    parse(tomllib.loads(text))
    target = Path(path)
    target.write_text(text, encoding="utf-8")
    return target


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_text(word) for word in value)}]"
    if isinstance(value, str):
        return _text(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # else a JSON string is one of TOML
