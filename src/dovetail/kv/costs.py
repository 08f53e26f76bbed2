"""What moving blocks costs: times of this machine's profile, or the shipped ones of an H200.

Owns the section "kv" of a profile: for each backend, direction and state of the GPU, and for every path, what was
measured, as [bytes of a row, bytes in all, microseconds, those of the host]; the GPU, and the entries of a batch:

    {"kv": {"cuda": {"device": "NVIDIA H200", "entries_per_call": 128,
                     "fetch": {"idle": {"dma-2d": [[16384, 41943040, 1117.0, 95.0]]}}}}}
"""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path as File
from typing import Any

from dovetail.kv.choose import Case, Costs, Path, Samples
from dovetail.kv.planner import Direction
from dovetail.measure import machine
from dovetail.profile import current as current_profile

logger = logging.getLogger(__name__)
SECTION = "kv"
STATES = {"idle": False, "beside": True}


def current(backend: str = "cuda", device: str = "") -> Costs:
    """The costs in force: of this machine's profile (`dovetail tune --only kv` puts them there), else shipped ones.

    A section of another GPU than `device` is ignored; so is one that is not understood, with a warning.
    """
    profile, _ = current_profile(machine.profile_key())
    every = profile.sections.get(SECTION)
    section = every.get(backend) if isinstance(every, dict) else every
    if not section or (isinstance(section, dict) and section.get("device", device) != device):
        return shipped()
    try:
        return parse(section, f"profile of {profile.date}")
    except ValueError as error:
        logger.warning("%s; until then: %s", error, shipped().source)
        return shipped()


@functools.cache
def shipped() -> Costs:
    """Those of one H200 with PCIe 5.0 x16."""
    data = json.loads(File(__file__).with_name("costs.json").read_text(encoding="utf-8"))
    return parse(data["cuda"], "shipped figures of an H200")


def parse(section: Any, source: str) -> Costs:
    """A section of a profile for one backend; raises ValueError if it has not the form of the docstring."""
    samples: dict[Case, Samples] = {}
    try:
        for direction in Direction:
            for state, beside in STATES.items():
                for path, points in section.get(direction, {}).get(state, {}).items():
                    samples[direction, beside, Path(path)] = Samples(points)
        entries, device = int(section["entries_per_call"]), str(section.get("device", ""))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        mend = "`dovetail tune --only kv` makes a new one"
        raise ValueError(f"section {SECTION!r} of the {source} is not understood ({error!r}); {mend}") from None
    return Costs(samples=samples, entries_per_call=entries, source=source, device=device)


def section(costs: Costs) -> dict[str, Any]:
    """The other way round."""
    made: dict[str, Any] = {"device": costs.device} if costs.device else {}
    made["entries_per_call"] = costs.entries_per_call
    for (direction, beside, path), samples in costs.samples.items():
        state = "beside" if beside else "idle"
        made.setdefault(str(direction), {}).setdefault(state, {})[str(path)] = [list(p) for p in samples.points]
    return made
