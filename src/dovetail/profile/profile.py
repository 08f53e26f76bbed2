"""The profile and the key that says where it holds.

Owns loading, validating, comparing and saving. The section "coll" is a table by backend, collective and number of
ranks; each entry is a list of ``[max_bytes, variant]`` or ``[max_bytes, variant, time_us]`` rows in ascending order,
the last with ``null`` for "any size". In a measured profile a row without a time was not measured: it is the shipped
default's. The section "points" has all that was measured, as ``[size_bytes, variant, time_us]``:

    {"coll": {"cpu": {"all_reduce": {"2": [[16384, "oneshot", 3.1], [null, "twoshot"]]}}},
     "points": {"cpu": {"all_reduce": {"2": [[16384, "oneshot", 3.1], [16384, "twoshot", 4.2]]}}}}

Other sections are kept as they are; the packages that own them validate them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from dovetail import env
from dovetail.profile.file import write_json

log = logging.getLogger("dovetail")
SCHEMA = "dovetail.profile/1"


@dataclass(frozen=True, kw_only=True)
class Key:
    """Where a profile holds."""

    device: str
    """What moves the bytes: a CPU's name and cores, a GPU's name."""
    driver: str
    """The kernel or the GPU driver, with its version."""
    ranks: tuple[int, ...] = ()
    """Numbers of ranks that collectives were measured with. Others take the nearest: no profile is refused for them."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the software that the figures depend on."""

    def misfit(self, wanted: Key) -> str | None:
        """Why a profile with this key does not hold for `wanted`, or None when it does."""
        if self.device != wanted.device:
            return f"it is of another device ({self.device}; this is {wanted.device})"
        if self.driver != wanted.driver:
            return f"it is stale: measured under {self.driver}, this is {wanted.driver}"
        for name in sorted({*self.versions, *wanted.versions}):
            then, now = self.versions.get(name, "none"), wanted.versions.get(name, "none")
            if then != now:
                return f"it is stale: measured with {name} {then}, this is {now}"
        return None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured, by section, and where it holds."""

    key: Key
    sections: Mapping[str, Any]
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    origin: str = "measured"
    """The file it came from, ``default`` for the shipped one, ``measured`` for a new one."""
    ignored: str = ""
    """Of the shipped default in force: why this machine's own profile is not; empty where there is none."""

    def merged(self, newer: Profile) -> Profile:
        """This profile with the figures of `newer` laid over it; `ValueError` when they are not of one machine."""
        if reason := self.key.misfit(newer.key):
            raise ValueError(f"the profiles cannot be merged: {reason}")
        ranks = tuple(sorted({*self.key.ranks, *newer.key.ranks}))
        return replace(newer, key=replace(newer.key, ranks=ranks), sections=_overlay(self.sections, newer.sections))


def load(path: str | os.PathLike[str], key: Key) -> tuple[Profile | None, str]:
    """The profile in `path` if it holds for `key`, and one line that says what came of it.

    Never raises for what a file contains: a missing, broken, stale or foreign one gives None and the reason.
    """
    profile, ignored = _found(path, key)
    return profile, _line(path, profile, ignored)


def current(key: Key) -> tuple[Profile, str]:
    """The profile in force: that of `DOVETAIL_PROFILE` or ~/.cache/dovetail/, otherwise the shipped default."""
    path = env.profile_path()
    profile, ignored = _found(path, key)
    line = _line(path, profile, ignored)
    return (profile, line) if profile else (replace(default(), ignored=ignored), f"shipped default ({line})")


def save(profile: Profile, path: str | os.PathLike[str] | None = None) -> Path:
    """Write `profile` to `path`, or where `current` looks for it; a file that cannot be loaded again is not written.

    A file there that does not hold where `profile` does is kept beside it under another name, with a warning.
    """
    data = {"schema": SCHEMA, "date": profile.date, "key": asdict(profile.key), "sections": dict(profile.sections)}
    _parse(data, "this profile")
    target = Path(path if path is not None else env.profile_path())
    _, ignored = _found(target, profile.key)
    if ignored and target.is_file():
        kept = _free_name(target)
        target.rename(kept)
        log.warning("the profile that was in %s is kept as %s: %s", target, kept.name, ignored)
    return write_json(data, target)


def _found(path: str | os.PathLike[str], key: Key) -> tuple[Profile | None, str]:
    """The profile in `path`, or None and why it does not hold for `key`: an empty text where there is none."""
    try:
        profile = _parse(json.loads(Path(path).read_text(encoding="utf-8")), str(path))
    except FileNotFoundError:
        return None, ""
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        return None, f"it cannot be read ({error})"
    except ValueError as error:
        return None, str(error)
    reason = profile.key.misfit(key)
    return (None, reason) if reason else (profile, "")


def _line(path: str | os.PathLike[str], profile: Profile | None, ignored: str) -> str:
    """What came of looking for a profile."""
    if profile:
        return f"profile {path} of {profile.date}"
    if ignored:
        return f"profile {path} ignored: {ignored}; `dovetail tune` makes a new one"
    return f"no profile at {path}; `dovetail tune` makes one"


def _free_name(path: Path) -> Path:
    """``profile.json`` -> ``profile.old.json``, with a number where that is taken."""
    names = (path.with_name(f"{path.stem}.old{number or ''}{path.suffix}") for number in count())
    return next(name for name in names if not name.exists())


@cache
def default() -> Profile:
    """The profile that is shipped: modest choices that work everywhere."""
    file = Path(__file__).with_name("default.json")
    return replace(_parse(json.loads(file.read_text(encoding="utf-8")), str(file)), origin="default")


def _parse(data: object, origin: str) -> Profile:
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"its schema is {found!r}, this version reads {SCHEMA!r}")
    key, sections = data.get("key"), data.get("sections")
    if not isinstance(key, dict) or not isinstance(sections, dict) or not isinstance(data.get("date"), str):
        raise ValueError("it needs the objects 'key' and 'sections' and the text 'date'")
    try:
        ranks = tuple(int(rank) for rank in key.get("ranks", ()))
        versions = {str(name): str(version) for name, version in dict(key.get("versions", {})).items()}
        where = Key(device=str(key["device"]), driver=str(key["driver"]), ranks=ranks, versions=versions)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its key is not understood ({error!r})") from None
    _check_tables(sections)
    return Profile(key=where, sections=sections, date=data["date"], origin=origin)


def _check_tables(sections: Mapping[str, Any]) -> None:
    """Raise `ValueError` that names the place when "coll" or "points" has not the form of the module's docstring."""
    for where, rows in _entries("coll", sections.get("coll", {})):
        if not rows or not all(_is_row(row) for row in rows):
            raise ValueError(f"{where} must be rows [max_bytes or null, variant, time_us]")
        limits = [row[0] for row in rows]
        if limits[-1] is not None or None in limits[:-1] or limits[:-1] != sorted(set(limits[:-1])):
            raise ValueError(f"{where} must ascend in max_bytes and end with null")
    for where, rows in _entries("points", sections.get("points", {})):
        if not all(_is_row(row) and len(row) == 3 and row[0] is not None for row in rows):
            raise ValueError(f"{where} must be rows [size_bytes, variant, time_us]")


def _entries(name: str, section: Any) -> Iterator[tuple[str, list[Any]]]:
    """Every list of a table by backend, collective and number of ranks, with its place."""
    if not isinstance(section, dict) or not all(isinstance(table, dict) for table in section.values()):
        raise ValueError(f"section {name!r} must be an object of backends")
    for backend, table in section.items():
        for collective, by_ranks in table.items():
            where = f"{name}.{backend}.{collective}"
            if not isinstance(by_ranks, dict) or not all(ranks.isdecimal() for ranks in by_ranks):
                raise ValueError(f"{where} must be an object by number of ranks")
            for ranks, rows in by_ranks.items():
                if not isinstance(rows, list):
                    raise ValueError(f"{where}.{ranks} must be a list of rows")
                yield f"{where}.{ranks}", rows


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) in (2, 3)
        and (row[0] is None or (isinstance(row[0], int) and row[0] >= 0))
        and isinstance(row[1], str)
        and (len(row) == 2 or isinstance(row[2], int | float))
    )


def _overlay(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for name, value in new.items():
        below = merged.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[name] = _overlay(below, value) if both else value  # type: ignore[arg-type]
    return merged
