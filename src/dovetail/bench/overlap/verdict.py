"""What the rows say: shares of the ideal speedup, why they are missed, and how well policies choose. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.bench.overlap.rows import POLICY, SETTING
from dovetail.bench.overlap.sample import POLICIES
from dovetail.bench.overlap.spec import LEAST_IDEAL, Row
from dovetail.overlap.strategy import ALL, Strategy

NEAR = 0.03
#: The papers' figures: of another machine, so never in our columns.
NOTE = (
    "for comparison, of another machine: C (ConCCL; MI300X and xGMI, 30 scenarios) reports mean shares of ideal of "
    "streams 21 %, priority 42 %, partition 41 %, DMA 66 %, DMA with partition 72 %; best speedup 1.67"
)
GROUPS: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("all", lambda row: True),
    ("with peers", lambda row: bool(row["with_peers"])),
    ("host link jobs", lambda row: not row["with_peers"]),
    ("compute-bound", lambda row: row["bound"] == "compute"),
    ("memory-bound", lambda row: row["bound"] == "memory"),
    ("streams of memory", lambda row: row["bound"] == "stream"),
    ("small messages", lambda row: bool(row["small"])),
    ("reductions", lambda row: bool(row["reduces"])),
)


def settings(rows: Sequence[Row]) -> list[Row]:
    """Rows of settings that have times."""
    return [row for row in rows if row["row"] == SETTING and row["strategy"] is not None]


def best_by_strategy(rows: Sequence[Row]) -> list[Row]:
    """Of each scenario and strategy the setting of the least time: that of the best number of cores."""
    found: dict[tuple[str, str], Row] = {}
    for row in settings(rows):
        key = (row["scenario"], row["strategy"])
        if key not in found or row["total_us"] < found[key]["total_us"]:
            found[key] = row
    return list(found.values())


def shares(rows: Sequence[Row]) -> dict[str, dict[str, tuple[float, int]]]:
    """By group and strategy: the mean share of ideal and the number of scenarios; groups without any are left out."""
    best = [row for row in best_by_strategy(rows) if row["strategy"] != Strategy.SERIAL and _tells(row)]
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for name, belongs in GROUPS:
        here: dict[str, tuple[float, int]] = {}
        for strategy in ALL:
            mine = [row["share_of_ideal"] for row in best if row["strategy"] == strategy and belongs(row)]
            if mine:
                here[str(strategy)] = sum(mine) / len(mine), len(mine)
        if here:
            found[name] = here
    return found


def _tells(row: Row) -> bool:
    """Is there enough to gain for a share of it to mean something?"""
    return bool(row["ideal_speedup"] >= LEAST_IDEAL)


def regrets(rows: Sequence[Row]) -> dict[str, list[float]]:
    """By policy, of each scenario in which it had something to say."""
    mine = [row for row in rows if row["row"] == POLICY]
    return {name: found for name in POLICIES if (found := [row["regret"] for row in mine if row["policy"] == name])}


def lines(rows: Sequence[Row]) -> list[str]:
    """For people."""
    found = [*_link(rows), *_shares(rows), *_best(rows), *_why(rows), *_policies(rows), *_energy(rows)]
    scenarios = dict.fromkeys((row["scenario"], row["correct"]) for row in rows)
    wrong = sum(not correct for _, correct in scenarios)
    return [*found, f"{wrong} of {len(scenarios)} scenarios WRONG" if wrong else "all correct"]


def _link(rows: Sequence[Row]) -> list[str]:
    """What the bytes go over, beside what the computation's go over."""
    told = [row for row in settings(rows) if row["memory_share"] is not None and row["backend"] != "cpu"]
    if not told:
        return []
    one_way, share = max(row["link_gbps"] for row in told), max(row["memory_share"] for row in told)
    both = f"both directions together are {share:.1%} of the memory's bandwidth"
    return [f"link to host memory: {one_way:.1f} GB/s in a direction at best; {both}"]


def _shares(rows: Sequence[Row]) -> list[str]:
    found = []
    for name, here in shares(rows).items():
        number = max(count for _, count in here.values())
        shown = ", ".join(f"{strategy} {share:.0%}" for strategy, (share, _) in here.items())
        found.append(f"mean share of the ideal speedup, {name} ({number}): {shown}")
    if len({(row["scenario"], row["strategy"]) for row in settings(rows)}) < len(settings(rows)):
        found.append("  of each strategy, that of the number of cores that was best in each scenario, in these rounds")
    poor = len({row["scenario"] for row in settings(rows) if not _tells(row)})
    return [*found, f"  not in the shares: {poor} scenarios of an ideal speedup below {LEAST_IDEAL}"] if poor else found


def _best(rows: Sequence[Row]) -> list[str]:
    mine = settings(rows)
    if not mine:
        return []
    top = max(mine, key=lambda row: float(row["speedup"]))
    return [f"best speedup: {top['speedup']:.2f} of {top['ideal_speedup']:.2f}, {top['setting']} in {top['scenario']}"]


def _why(rows: Sequence[Row]) -> list[str]:
    """How much each side is slowed down, and which of them the pair waits for."""
    best = best_by_strategy(rows)
    found = []
    for strategy in ALL:
        mine = [row for row in best if row["strategy"] == strategy and row["compute_slowdown"] is not None]
        if not mine:
            continue
        compute, comm = (sum(row[f"{side}_slowdown"] for row in mine) / len(mine) for side in ("compute", "comm"))
        late = sum(row["comm_us"] > row["compute_us"] for row in mine)
        ideal = sum(row["alone_comm_us"][row["mover"]] > row["alone_compute_us"] for row in mine)
        found.append(
            f"{strategy}: the computation takes x{compute:.2f}, the communication x{comm:.2f} of its time alone; the "
            f"communication ends last in {late} of {len(mine)} (it is the longer one in {ideal})"
        )
    return found


def _policies(rows: Sequence[Row]) -> list[str]:
    """How far each policy is from the best of the sweep, in other rounds than those that found the best."""
    found = []
    for name, mine in regrets(rows).items():
        near = sum(regret <= NEAR for regret in mine)
        found.append(
            f"{name}: within {NEAR:.0%} of the best in {near} of {len(mine)} scenarios; regret {_mean(mine):.1%} "
            f"on the mean, {max(mine):.0%} at worst"
        )
    return found


def _energy(rows: Sequence[Row]) -> list[str]:
    """Joules of a pair by engines over those by a kernel, where both were told apart from idle."""
    joules: dict[str, dict[str, Row]] = {}
    for row in best_by_strategy([row for row in settings(rows) if row["joules"]]):
        joules.setdefault(row["scenario"], {})[row["strategy"]] = row
    both = [by for by in joules.values() if {Strategy.STREAMS, Strategy.DMA} <= set(by)]
    if not both:
        return []
    ratios = [by[Strategy.DMA]["joules"] / by[Strategy.STREAMS]["joules"] for by in both]
    less = sum(ratio < 1 for ratio in ratios)
    spread = f"{_mean(ratios):.2f} on the mean ({min(ratios):.2f} to {max(ratios):.2f})"
    return [f"energy above idle of a pair, dma / streams: {spread}; less in {less} of {len(ratios)} scenarios"]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
