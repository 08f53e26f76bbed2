"""Which variant `auto` takes, and why. In force is what rank 0 has: profile, forced variant, `DOVETAIL_DISABLE`."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from dovetail import env
from dovetail.coll.recipes import VARIANTS, Collective
from dovetail.hw.world import Group
from dovetail.measure.machine import profile_key
from dovetail.profile import Key, Profile, choose, current


class Choice(NamedTuple):
    """A variant and one line that says why."""

    variant: str
    reason: str


def notice(size: int) -> bytes:
    """What this rank would have all ranks do, if it is rank 0."""
    profile, reason = current(profile_key([size]))
    coll = {"cpu": profile.sections.get("coll", {}).get("cpu", {})}
    return json.dumps(
        {
            "variant": env.variant(),
            "disable": env.disable(),
            "coll": coll,
            "date": profile.date,
            "origin": profile.origin,
            "reason": reason,
        }
    ).encode()


def settings(group: Group) -> dict[str, Any]:
    """Rank 0's notice."""
    found: dict[str, Any] = json.loads(group.world.notices[0] or b"{}")
    return found


def variant_for(
    group: Group, collective: Collective, size_bytes: int, requested: str, in_place: bool = False
) -> Choice:
    """The variant to run. `requested` is "auto" or a name; raises `ValueError` for one that the collective lacks."""
    names = VARIANTS[collective]
    label = collective.name.lower()
    if requested != "auto":
        return Choice(_known(requested, names, label, "variant"), "asked for")
    if not group.world.local:
        return Choice("torch", "the group spans hosts")
    told = settings(group)
    if told.get("disable"):
        return Choice("torch", "DOVETAIL_DISABLE")
    forced = told.get("variant")
    if forced and (forced in names or forced == "torch"):
        return Choice(forced, "DOVETAIL_VARIANT")
    if in_place and "swap" in names:
        return Choice("swap", "input and output are one tensor")
    if len(names) == 1:
        return Choice(names[0], "the only variant")
    key = Key(device="", driver="")
    profile = Profile(
        key=key, sections={"coll": told.get("coll", {})}, date=told.get("date", ""), origin=told.get("origin", "")
    )
    picked = choose(label, group.size, size_bytes, profile=profile if told.get("coll") else None)
    if picked.variant not in (*names, "torch"):
        return Choice(names[0], f"the profile names {picked.variant!r}, which {label} does not have")
    return Choice(*picked)


def _known(name: str, names: tuple[str, ...], label: str, what: str) -> str:
    if name != "torch" and name not in names:
        allowed = ", ".join(["auto", *names, "torch"])
        raise ValueError(f"{label} has no {what} {name!r}; it has {allowed}")
    return name
