"""Rows from samples: pure. A row for each setting of a scenario, and one for each policy.

Times of settings are medians over all rounds. A policy is judged apart from the choice of the best: the best setting is
that of the even rounds, and both are compared on the odd ones. What a policy chose was decided before any of them; of
the settings that the runtime would try, by the even ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.bench.overlap.sample import AUTO, POLICIES, TRIED, Sampled
from dovetail.bench.overlap.spec import Row
from dovetail.measure.stats import median
from dovetail.overlap import policy
from dovetail.overlap.ideal import Pair
from dovetail.overlap.strategy import Setting, Strategy
from dovetail.overlap.timing import Times

SETTING, POLICY = "setting", "policy"  #: what a row is of


def rows_of(samples: Sequence[Sampled], memory_bytes_per_s: float | None = None) -> list[Row]:
    """Of all scenarios, in their order."""
    return [row for sampled in samples for row in _rows(sampled, memory_bytes_per_s)]


def _rows(sampled: Sampled, memory_bytes_per_s: float | None) -> list[Row]:
    same = _same(sampled)
    if not sampled.both:
        return [same | {"row": SETTING, "strategy": None, "setting": None, "correct": False}]
    pair = pair_of(sampled)
    same |= {
        "class": pair.kind, "ratio": pair.comm_us / pair.compute_us, "alone_compute_us": pair.compute_us,
        "alone_comm_us": {str(mover): median(times) for mover, times in sampled.comm_us.items()},
        "serial_us": pair.serial_us, "ideal_us": pair.ideal_us, "ideal_speedup": pair.ideal_speedup,
    }  # fmt: skip
    found = [_setting(sampled, same, pair, setting, memory_bytes_per_s) for setting in sampled.both]
    choices = dict(sampled.choices)
    if sampled.tried:
        choices[TRIED] = best_of(sampled, sampled.tried)
    return found + [_policy(sampled, same, name, choices[name]) for name in POLICIES if name in choices]


def pair_of(sampled: Sampled) -> Pair:
    """The two alone, the communication by the mover that is faster; one after the other, by that one."""
    alone = {mover: median(times) for mover, times in sampled.comm_us.items()}
    faster = min(alone, key=lambda mover: alone[mover])
    serial = sampled.both[Setting(Strategy.SERIAL, mover=faster)]
    return Pair(compute_us=median(sampled.compute_us), comm_us=alone[faster], serial_us=_total_us(serial))


def _total_us(times: Sequence[Times]) -> float:
    return median(each.total_us for each in times)


def _same(sampled: Sampled) -> Row:
    scenario = sampled.scenario
    return {
        "collective": "overlap", "backend": sampled.backend, "ranks": sampled.ranks, "scenario": scenario.name,
        "computation": scenario.compute.name, "communication": scenario.job.name, "bound": str(scenario.compute.bound),
        "kind": sampled.traffic.kind, "with_peers": scenario.job.with_peers or sampled.backend == "cpu",
        "small": scenario.job.is_small, "reduces": sampled.traffic.reduces, "target_ratio": scenario.ratio,
        "size_bytes": sampled.traffic.size_bytes, "piece_bytes": sampled.piece_bytes,
        "crossing_bytes": sampled.crossing_bytes, "repeats": sampled.repeats, "flops": sampled.load.flops,
        "compute_bytes": sampled.load.size_bytes, "iterations": len(sampled.compute_us), "correct": sampled.right,
    }  # fmt: skip


def _setting(sampled: Sampled, same: Row, pair: Pair, setting: Setting, memory_bytes_per_s: float | None) -> Row:
    times, mover = sampled.both[setting], setting.moved_by
    total_us = _total_us(times)
    compute_us, comm_us = (median(getattr(each, name) or 0.0 for each in times) for name in ("compute_us", "comm_us"))
    serial = setting.strategy is Strategy.SERIAL
    moving_us = max(comm_us - compute_us, 1e-3) if serial else comm_us
    joules = sampled.joules.get(setting)
    rate = sampled.crossing_bytes / moving_us * 1e6
    return same | {
        "row": SETTING, "strategy": str(setting.strategy), "cores": setting.cores, "mover": str(mover),
        "setting": str(setting), "compute_us": compute_us, "comm_us": comm_us, "total_us": total_us,
        "speedup": pair.serial_us / total_us, "share_of_ideal": pair.share(total_us),
        "compute_slowdown": None if serial else compute_us / pair.compute_us,
        "comm_slowdown": None if serial else comm_us / same["alone_comm_us"][str(mover)],
        "link_gbps": sampled.traffic.size_bytes / moving_us / 1e3,
        "memory_share": None if memory_bytes_per_s is None else rate / memory_bytes_per_s,
        "joules": joules[0] if joules else None, "joules_error": joules[1] if joules else None,
    }  # fmt: skip


def _policy(sampled: Sampled, same: Row, name: str, chosen: Setting) -> Row:
    best = best_of(sampled, list(sampled.both))
    chosen_us, best_us = (_total_us(sampled.both[setting][1::2]) for setting in (chosen, best))
    return same | {
        "row": POLICY, "policy": name, "strategy": str(chosen.strategy), "cores": chosen.cores,
        "mover": str(chosen.moved_by), "setting": str(chosen), "total_us": chosen_us, "best": str(best),
        "best_us": best_us, "regret": policy.regret(chosen_us, best_us),
        "reason": sampled.reason if name == AUTO else "",
    }  # fmt: skip


def best_of(sampled: Sampled, among: Sequence[Setting]) -> Setting:
    """By the even rounds."""
    return min(among, key=lambda setting: _total_us(sampled.both[setting][::2]))
