"""The record: the one form in which every command writes what it found.

Owns the form, its JSON file and its validation. What the rows hold belongs to the command; `kind` names it
(``bench``, ``doctor``, ``phases`` ...), and the schema is ``dovetail.KIND/1``. A simulated figure and a measured one
never share a record.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dovetail.measure import machine as this_machine
from dovetail.profile.file import write_json

VERSION = 1
_SCHEMA = re.compile(r"dovetail\.([a-z_]+)/(\d+)")
_TYPES: dict[str, type] = {
    "schema": str,
    "command": str,
    "date": str,
    "machine": dict,
    "versions": dict,
    "simulated": bool,
    "rows": list,
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a command found, and where, when and with what."""

    schema: str
    """``dovetail.KIND/1``."""
    command: str
    """The command line that made it, ready to be run again."""
    machine: dict[str, Any]
    """As `dovetail.measure.machine.describe` gives it."""
    versions: dict[str, str]
    """As `dovetail.measure.machine.versions` gives it."""
    rows: list[dict[str, Any]]
    """One dict per line of the result."""
    simulated: bool = False
    """True when the figures come from a model of a machine."""
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """ISO 8601 with a time zone."""

    def __post_init__(self) -> None:
        validate(asdict(self))

    @property
    def kind(self) -> str:
        """The middle of the schema: ``bench`` of ``dovetail.bench/1``."""
        found = _SCHEMA.fullmatch(self.schema)
        assert found is not None
        return found[1]


def new(kind: str, command: Sequence[str] | str, rows: list[dict[str, Any]], *, simulated: bool = False) -> Record:
    """A record of this machine, now. `command` is a command line or the list of its words."""
    line = command if isinstance(command, str) else shlex.join(command)
    return Record(
        schema=f"dovetail.{kind}/{VERSION}",
        command=line,
        machine=this_machine.describe(),
        versions=this_machine.versions(),
        rows=rows,
        simulated=simulated,
    )


def validate(data: object, *, kind: str | None = None, where: str = "record") -> None:
    """Raise `ValueError` that names the field when `data` is no record (of `kind`, if given)."""
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected a JSON object, found {type(data).__name__}")
    for name, wanted in _TYPES.items():
        if name not in data:
            raise ValueError(f"{where}: the field {name!r} is missing; a record has {', '.join(_TYPES)}")
        if not isinstance(data[name], wanted):
            raise ValueError(f"{where}: {name!r} must be {wanted.__name__}, found {type(data[name]).__name__}")
    found = _SCHEMA.fullmatch(data["schema"])
    if found is None or int(found[2]) != VERSION:
        raise ValueError(f"{where}: schema {data['schema']!r} is not known; this version reads dovetail.KIND/{VERSION}")
    if kind is not None and found[1] != kind:
        raise ValueError(f"{where}: schema {data['schema']!r} is not a {kind!r} record")
    try:
        aware = datetime.fromisoformat(data["date"]).tzinfo is not None
    except ValueError:
        aware = False
    if not aware:
        raise ValueError(f"{where}: date {data['date']!r} is not an ISO 8601 date with a time zone")
    for index, row in enumerate(data["rows"]):
        if not isinstance(row, dict):
            raise ValueError(f"{where}: rows[{index}] must be an object, found {type(row).__name__}")


def write(record: Record, path: str | os.PathLike[str]) -> Path:
    """Write `record` to `path` at once: a reader sees the old file or the whole new one."""
    return write_json(asdict(record), path)


def read(path: str | os.PathLike[str], *, kind: str | None = None) -> Record:
    """Read and validate a record; a field that this version does not know is an error, not ignored.

    Raises:
        ValueError: the file is no JSON, no record, or not of `kind`; the message starts with the path.
        OSError: the file cannot be read.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    validate(data, kind=kind, where=str(path))
    extra = sorted(set(data) - {f.name for f in fields(Record)})
    if extra:
        raise ValueError(f"{path}: unknown fields {', '.join(extra)}")
    return Record(**data)
