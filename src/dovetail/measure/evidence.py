"""What was proved and tested on a GPU, as it stands in the profile: the sections "engines" and "selftest".

Owns writing them without disturbing other sections, and saying whether they hold for a GPU. One entry per backend, each
with the device, its driver and a date. Who makes an entry decides what else is in it: `dovetail doctor --prove` the
word for each path, `dovetail doctor --selftest` whether it passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dovetail import env, profile
from dovetail.measure import machine

ENGINES, SELFTEST = "engines", "selftest"
_COMMANDS = {ENGINES: "dovetail doctor --prove", SELFTEST: "dovetail doctor --selftest"}


def stamped(device: str, driver: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of now: `facts` with what they hold for."""
    return {"device": device, "driver": driver, "date": datetime.now(UTC).isoformat(timespec="seconds"), **facts}


def save(section: str, backend: str, entry: Mapping[str, Any]) -> Path:
    """Puts an entry into the profile in force in place of an older one; everything else in the profile stays."""
    old, _ = profile.load(env.profile_path(), machine.profile_key())
    base = old or profile.Profile(key=machine.profile_key(), sections={})
    entries = {**base.sections.get(section, {}), backend: dict(entry)}
    return profile.save(replace(base, sections={**base.sections, section: entries}))


def found(section: str, backend: str) -> dict[str, Any]:
    """The entry in the profile of this machine; empty without one. Ranks don't matter to it."""
    here, _ = profile.current(machine.profile_key())
    entry: dict[str, Any] = here.sections.get(section, {}).get(backend, {})
    return entry


def misfit(section: str, entry: Mapping[str, Any], device: str, driver: int) -> str | None:
    """Why an entry does not hold for a GPU; None when it does."""
    command = _COMMANDS[section]
    if not entry:
        return f"`{command}` has not run on {device}"
    if entry.get("device") != device or entry.get("driver") != driver:
        return f"`{command}` ran on {entry.get('device')} with driver {entry.get('driver')}, this is another"
    return None


def mend(section: str) -> str:
    """What to do about a misfit."""
    return f"run `{_COMMANDS[section]}`"
