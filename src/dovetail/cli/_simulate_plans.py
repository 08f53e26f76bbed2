"""What `dovetail simulate collective` and `whatif` do: rows, tables and lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dovetail.measure.sizes import format_bytes

if TYPE_CHECKING:
    from dovetail.sim.machine import Machine

Row = dict[str, Any]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Asked:
    """The options."""

    collective: str
    variants: tuple[str, ...]
    launches: tuple[bool, ...]
    complete: bool
    ranks: int | None


def rows(machine: Machine, asked: Asked, sizes: Sequence[int]) -> list[Row]:
    """A row for each size, variant and way to launch it; each plan is priced once."""
    from dovetail.sim.collectives import COPY, Case, baseline, baseline_of, program_of, unit_bytes
    from dovetail.sim.replay import native, price
    from dovetail.sim.result import Result

    ranks = asked.ranks or (2 if asked.collective == COPY else machine.ranks)
    machine.require(ranks, f"this {asked.collective}")
    steps, unit = native(machine), unit_bytes(asked.collective, ranks)
    over = f"speedup_over_{baseline(asked.collective)}"
    known: dict[Case, Result] = {}

    def run(case: Case) -> Result:
        if case not in known:
            known[case] = price(program_of(case, steps), machine)
        return known[case]

    found = []
    for size in dict.fromkeys(size - size % unit or unit for size in sizes):
        for variant in asked.variants:
            for early in asked.launches:
                case = Case(
                    collective=asked.collective, variant=variant, total_bytes=size, ranks=ranks, prelaunch=early,
                    complete=asked.complete,
                )  # fmt: skip
                speedup = run(baseline_of(case)).time_ns / run(case).time_ns
                found.append(_row(machine, case, run(case), {over: speedup}))
    return found


def _row(machine: Machine, case: Any, result: Any, speedup: Row) -> Row:
    return {
        "machine": machine.name,
        "collective": case.collective,
        "variant": case.variant,
        "prelaunch": case.prelaunch,
        "ranks": case.ranks,
        "total_bytes": case.total_bytes,
        "time_us": result.time_us,
        **speedup,
        "limit_us": result.limit_ns / 1000,
        "phases": {phase.value: ns / 1000 for phase, ns in result.phases_ns.items()},
        **{f"{phase}_pct": 100 * share for phase, share in result.shares().items()},
        "simulated": True,
    }


def table(collective: str, rows: Sequence[Row]) -> tuple[list[str], list[Row]]:
    """Headings, and a line for each row."""
    from dovetail.sim.collectives import baseline
    from dovetail.sim.result import Phase

    base = baseline(collective)
    headings = ["total B", "variant", "time us", f"over {base}", "of link", *Phase]
    lines = []
    for row in rows:
        cells = [
            format_bytes(row["total_bytes"]), named(row), f"{row['time_us']:.4g}", f"{row[f'speedup_over_{base}']:.2f}",
            f"{row['limit_us'] / row['time_us']:.0%}", *(f"{row[f'{phase}_pct']:.0f}%" for phase in Phase),
        ]  # fmt: skip
        lines.append(dict(zip(headings, cells, strict=True)))
    return headings, lines


def named(row: Row) -> str:
    """A variant, and whether it was queued beforehand."""
    return f"{row['variant']} prelaunched" if row["prelaunch"] else str(row["variant"])


def lines(rows: Sequence[Row]) -> tuple[dict[str, Points], Points, dict[str, str]]:
    """Times by variant, the limit of the links, and which line belongs to which."""
    series: dict[str, Points] = {}
    for row in rows:
        series.setdefault(named(row), []).append((row["total_bytes"], row["time_us"]))
    limit = [(row["total_bytes"], row["limit_us"]) for row in rows if named(row) == named(rows[0])]
    return series, limit, {named(row): row["variant"] for row in rows if row["prelaunch"]}


def changes(machine: Machine, collective: str, sizes: Sequence[int], ranks: int | None) -> list[Row]:
    """A row for each size and change."""
    from dovetail.sim.collectives import unit_bytes
    from dovetail.sim.whatif import whatif

    unit = unit_bytes(collective, ranks or machine.ranks)
    rounded = list(dict.fromkeys(size - size % unit or unit for size in sizes))
    found = whatif(machine, collective, rounded, ranks)
    return [{"machine": machine.name, **asdict(row), "simulated": True} for row in found]


def _by_size(rows: Sequence[Row]) -> dict[int, dict[str, Row]]:
    found: dict[int, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["total_bytes"], {})[row["change"]] = row
    return found


def change_table(rows: Sequence[Row]) -> tuple[list[str], list[Row]]:
    """Headings, and a line for each size."""
    from dovetail.sim.whatif import AS_IS, CHANGES

    others = [change.name for change in CHANGES if change.name != AS_IS]
    headings = ["total B", "as it is us", "link us", *others]
    lines = []
    for size, mine in _by_size(rows).items():
        now = mine[AS_IS]
        cells = [format_bytes(size), f"{now['time_us']:.4g} ({now['variant']})", f"{now['limit_us']:.3g}"]
        cells += [f"{mine[name]['closed']:.0%}" for name in others]
        lines.append(dict(zip(headings, cells, strict=True)))
    return headings, lines


def change_lines(rows: Sequence[Row]) -> tuple[dict[str, Points], Points]:
    """Times by change, and the limit of the links."""
    from dovetail.sim.whatif import AS_IS, CHANGES

    sizes = _by_size(rows)
    series = {c.name: [(float(size), mine[c.name]["time_us"]) for size, mine in sizes.items()] for c in CHANGES}
    return series, [(float(size), mine[AS_IS]["limit_us"]) for size, mine in sizes.items()]


def legend() -> list[str]:
    """What each change stands for."""
    from dovetail.sim.whatif import CHANGES

    return [f"  {change.name}: {change.what}" for change in CHANGES]
