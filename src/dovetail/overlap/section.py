"""The section "overlap" of a profile, by backend: read, with errors that name the place, and written.

    {"overlap": {"cuda": {"device": "NVIDIA H200", "num_cores": 132, "core_step": 8, "flops": 8e14,
                          "memory_bytes_per_s": 4.1e12, "link_bytes_per_s": 5.5e10,
                          "compute_alone": {"memory": [[75000000, 24.0, 132], [300000000, 78.0, 132]]},
                          "compute_by_cores": {"compute": [[124, 1.06], [132, 1.0]]},
                          "comm_by_cores": {"all_gather": [[8, 1.4], [16, 1.0]]},
                          "alone": {"all_gather": {"engines": [[1048576, 24.0, 0]], "cores": [[1048576, 27.0, 16]]}},
                          "beside": [["dma", 0, "compute", "all_gather", 1048576, 1.01, 1.0]],
                          "joules_per_gb": {"engines": 1.1, "cores": 3.0}}}}

All that follows the rates may be left out. `compute_alone` is of one kernel, by FLOPs for what compute bounds, else by
bytes. A row of `beside` is strategy, cores, bound, kind, bytes, and how many times longer than alone computation and
communication take, for as long as both run; alone is with all cores, and by the same mover at its best. What moves
inside one GPU is of the kind "local", whatever it is for.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from dovetail.measure import machine
from dovetail.overlap.strategy import Strategy
from dovetail.overlap.tables import TUNE, Beside, ByCores, BySize, Tables
from dovetail.overlap.tasks import Bound, Mover
from dovetail.profile import current as current_profile

logger = logging.getLogger(__name__)
SECTION = "overlap"


def current(backend: str, device: str = "") -> Tables | None:
    """What the profile of this machine has of a backend (`dovetail tune --only overlap` puts it there); None: nothing.

    A section of another device than `device` is ignored; so is one that is not understood, with a warning.
    """
    profile, _ = current_profile(machine.profile_key())
    every = profile.sections.get(SECTION)
    found = every.get(backend) if isinstance(every, dict) else every
    if not found or (isinstance(found, dict) and found.get("device", device) != device):
        return None
    try:
        return parse(found, f"profile of {profile.date}")
    except ValueError as error:
        logger.warning("%s; until then it counts as not measured", error)
        return None


def parse(section: Any, source: str) -> Tables:
    """A section of a profile for one backend; raises ValueError that names the place if it has not the form above."""
    try:
        return _parse(section, source)
    except ValueError as error:
        mend = f"`{TUNE}` makes a new one"
        raise ValueError(f"section {SECTION!r} of the {source} is not understood ({error}); {mend}") from None


def section(tables: Tables) -> dict[str, Any]:
    """The other way round."""
    made: dict[str, Any] = {"device": tables.device} if tables.device else {}
    made |= {name: getattr(tables, name) for name in (*_COUNTS, *_RATES)}
    alone: dict[str, Any] = {}
    for (kind, mover), by_size in tables.alone.items():
        alone.setdefault(kind, {})[str(mover)] = _rows(by_size)
    rows = [
        [str(r.strategy), r.cores, str(r.bound), r.kind, r.size_bytes, r.compute_slowdown, r.comm_slowdown]
        for r in tables.beside
    ]
    optional: dict[str, Any] = {
        "compute_alone": {str(bound): _rows(curve) for bound, curve in tables.compute_alone.items()},
        "compute_by_cores": {str(bound): _rows(curve) for bound, curve in tables.compute_by_cores.items()},
        "comm_by_cores": {kind: _rows(curve) for kind, curve in tables.comm_by_cores.items()},
        "alone": alone,
        "beside": rows,
        "joules_per_gb": {str(mover): joules for mover, joules in tables.joules_per_gb.items()},
    }
    return made | {name: value for name, value in optional.items() if value}


_COUNTS = ("num_cores", "core_step")
_RATES = ("flops", "memory_bytes_per_s", "link_bytes_per_s")
_OPTIONAL = ("device", "compute_alone", "compute_by_cores", "comm_by_cores", "alone", "beside", "joules_per_gb")
_Name = TypeVar("_Name", bound=StrEnum)
_Made = TypeVar("_Made", ByCores, BySize, Beside)
_MOST = 1e300  # not infinity, and not too large to reckon with
_Reader = Callable[[Any, str], Any]


def _rows(curve: ByCores | BySize) -> list[list[float]]:
    return [list(point) for point in curve.points]


def _check_fields(data: Any) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"it must be an object, not {data!r}")
    if unknown := sorted(set(data) - {*_COUNTS, *_RATES, *_OPTIONAL}):
        raise ValueError(f"{unknown[0]}: there is no such field")
    if missing := [name for name in (*_COUNTS, *_RATES) if name not in data]:
        raise ValueError(f"{missing[0]}: it is missing")


def _parse(data: Any, source: str) -> Tables:
    _check_fields(data)
    by_cores, by_size = (_count, _positive), (_count, _positive, _count_or_0)
    return Tables(
        num_cores=_count(data["num_cores"], "num_cores"),
        core_step=_count(data["core_step"], "core_step"),
        flops=_positive(data["flops"], "flops"),
        memory_bytes_per_s=_positive(data["memory_bytes_per_s"], "memory_bytes_per_s"),
        link_bytes_per_s=_positive(data["link_bytes_per_s"], "link_bytes_per_s"),
        compute_alone={
            _name(Bound, bound, where): _curve(BySize, points, where, by_size)
            for bound, points, where in _entries(data.get("compute_alone", {}), "compute_alone")
        },
        compute_by_cores={
            _name(Bound, bound, where): _curve(ByCores, points, where, by_cores)
            for bound, points, where in _entries(data.get("compute_by_cores", {}), "compute_by_cores")
        },
        comm_by_cores={
            kind: _curve(ByCores, points, where, by_cores)
            for kind, points, where in _entries(data.get("comm_by_cores", {}), "comm_by_cores")
        },
        alone={
            (kind, _name(Mover, mover, where)): _curve(BySize, points, where, by_size)
            for kind, movers, of_kind in _entries(data.get("alone", {}), "alone")
            for mover, points, where in _entries(movers, of_kind)
        },
        beside=tuple(_beside(row, where) for row, where in _items(data.get("beside", []), "beside")),
        joules_per_gb={
            _name(Mover, mover, where): _positive(joules, where)
            for mover, joules, where in _entries(data.get("joules_per_gb", {}), "joules_per_gb")
        },
        source=source,
        device=_text(data["device"], "device") if "device" in data else "",
    )


def _entries(value: Any, where: str) -> list[tuple[str, Any, str]]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be an object, not {value!r}")
    return [(str(name), entry, f"{where}.{name}") for name, entry in value.items()]


def _items(value: Any, where: str) -> list[tuple[Any, str]]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: must be a list, not {value!r}")
    return [(item, f"{where}[{n}]") for n, item in enumerate(value)]


def _row(value: Any, where: str, fields: Sequence[_Reader]) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) != len(fields):
        raise ValueError(f"{where}: must be a list of {len(fields)}, not {value!r}")
    return tuple(read(item, f"{where}[{n}]") for n, (read, item) in enumerate(zip(fields, value, strict=True)))


def _curve(make: Callable[[Any], _Made], value: Any, where: str, fields: Sequence[_Reader]) -> _Made:
    return _made(make, where, tuple(_row(point, at, fields) for point, at in _items(value, where)))


def _beside(value: Any, where: str) -> Beside:
    strategy, bound = functools.partial(_name, Strategy), functools.partial(_name, Bound)
    fields = (strategy, _count_or_0, bound, _text, _count, _positive, _positive)
    return _made(Beside, where, *_row(value, where, fields))


def _made(make: Callable[..., _Made], where: str, *given: Any) -> _Made:
    try:
        return make(*given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _name(names: type[_Name], value: Any, where: str) -> _Name:
    if not isinstance(value, str) or value not in set(names):
        raise ValueError(f"{where}: must be one of {', '.join(names)}, not {value!r}")
    return names(value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: must be text, not {value!r}")
    return value


def _at_least_0(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise ValueError(f"{where}: must be a number that is not negative, not {value!r}")
    return float(value)


def _positive(value: Any, where: str) -> float:
    if not _at_least_0(value, where):
        raise ValueError(f"{where}: must be more than 0")
    return float(value)


def _count_or_0(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{where}: must be a count, not {value!r}")
    return value


def _count(value: Any, where: str) -> int:
    if not _count_or_0(value, where):
        raise ValueError(f"{where}: must be more than 0")
    return value  # type: ignore[no-any-return]
