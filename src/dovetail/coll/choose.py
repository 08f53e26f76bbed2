"""Which variant `auto` takes, and why. In force is what rank 0 has: profile, forced variant, `DOVETAIL_DISABLE`."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from dovetail import env
from dovetail.coll.recipes import VARIANTS, Collective
from dovetail.errors import DovetailError
from dovetail.hw.gpu.device import Device
from dovetail.hw.world import Group
from dovetail.measure.machine import profile_key
from dovetail.profile import Key, Profile, choose, current, quoted

log = logging.getLogger("dovetail")


class Choice(NamedTuple):
    """A variant and one line that says why."""

    variant: str
    reason: str


def notice() -> bytes:
    """What this rank would have all ranks do, if it is rank 0."""
    profile, _ = current(profile_key())
    sections = profile.sections
    fused = sections.get("fused", {})
    return json.dumps(
        {
            "variant": env.variant(),
            "transport": env.transport(),
            "fused": fused,
            "gpu": {backend: _gpu(backend) for backend, figures in fused.items() if "device" in figures},
            "disable": env.disable(),
            "coll": sections.get("coll", {}),
            "points": quoted(profile),
            "date": profile.date,
            "origin": profile.origin,
            "ignored": profile.ignored,
            "selftest": sections.get("selftest", {}),
            "engines": sections.get("engines", {}),
        }
    ).encode()


def _gpu(backend: str) -> tuple[str, int]:
    """Name of this rank's first GPU, and its driver; asked for only where figures of one are there."""
    from dovetail.hw.gpu.driver import load

    try:
        driver = load(backend)
        return driver.device_name(0), driver.version
    except (DovetailError, ValueError):
        return "no GPU", 0


def settings(group: Group) -> dict[str, Any]:
    """Rank 0's notice."""
    return _parsed(group.world.notices[0] or b"{}")


@functools.lru_cache(maxsize=8)
def _parsed(notice: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(notice)
    return found


def variant_for(
    group: Group,
    collective: Collective,
    size_bytes: int,
    requested: str,
    in_place: bool = False,
    *,
    backend: str = "cpu",
    device: Device | None = None,
) -> Choice:
    """The variant to run. `requested` is "auto" or a name; raises `ValueError` for one that the collective lacks.

    On a GPU (`device`), `auto` takes a path of ours only where the self-test has passed on such a device and driver.
    """
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
    if device is not None and (reason := untested(told.get("selftest", {}), device)):
        _say_once(reason)
        return Choice("torch", reason)
    if in_place and "swap" in names:
        return Choice("swap", "input and output are one tensor")
    if len(names) == 1:
        return Choice(names[0], "the only variant")
    picked = choose(label, group.size, size_bytes, backend=backend, profile=_profile(told))
    if picked.variant not in (*names, "torch"):
        return Choice(names[0], f"the profile names {picked.variant!r}, which {label} does not have")
    return Choice(*picked)


def _profile(told: dict[str, Any]) -> Profile | None:
    """As much of rank 0's profile as a choice depends on."""
    if "coll" not in told:
        return None
    sections = {"coll": told["coll"], "points": told["points"]}
    words = {name: told[name] for name in ("date", "origin", "ignored")}
    return Profile(key=Key(device="", driver=""), sections=sections, **words)


def untested(selftest: dict[str, Any], device: Device) -> str | None:
    """Why our path may not be taken on its own on this device; None when the self-test has passed here."""
    found = selftest.get(device.caps.backend)
    mend = "run `dovetail doctor --selftest`"
    if not found:
        return f"the self-test has not run on {device.name}: {mend}"
    if found.get("device") != device.name or found.get("driver") != device.driver.version:
        return f"the self-test passed on {found.get('device')} with driver {found.get('driver')}, not here: {mend}"
    if found.get("gpus", 1) < 2 <= device.driver.num_devices():
        return f"the self-test passed with ranks on one {device.name} only, and this process sees several: {mend}"
    if not found.get("passed"):
        return f"the self-test failed on {device.name} ({found.get('date', 'no date')}): {mend}"
    return None


@functools.cache
def _say_once(reason: str) -> None:
    log.warning("collectives on GPU tensors run on the torch process group: %s", reason)


def engine_of(group: Group, device: Device) -> Callable[[dict[str, int]], tuple[str, int]]:
    """Who moves bytes on which path ("h2d", "d2h", "d2d"), and how many multiprocessors that takes.

    From the proof that `dovetail doctor --prove` left in the profile; without one a path is unproved. Reductions are a
    kernel of ours, which needs no proof.
    """
    told = settings(group).get("engines", {}).get(device.caps.backend, {})
    here = told if told.get("device") == device.name and told.get("driver") == device.driver.version else {}
    proved = {**here.get("paths", {}), "reduce": "SM kernel"}
    cores = device.driver.num_multiprocessors(device.index)

    def describe(paths: dict[str, int]) -> tuple[str, int]:
        names = {path: proved.get(path, "unproved") for path in paths}
        text = ", ".join(f"{path}: {who}" for path, who in sorted(names.items())) or "unproved"
        return text, cores if "SM kernel" in names.values() else 0

    return describe


def _known(name: str, names: tuple[str, ...], label: str, what: str) -> str:
    if name != "torch" and name not in names:
        allowed = ", ".join(["auto", *names, "torch"])
        raise ValueError(f"{label} has no {what} {name!r}; it has {allowed}")
    return name
