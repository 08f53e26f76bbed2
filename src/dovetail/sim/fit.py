"""Refits the free constants of a machine to tables, on half of the sizes, and says how well the other half is met.

Owns the residuals and a small damped least-squares in the logarithm of the constants, so that they stay positive. A
time or a speedup counts by its log error; a share of a phase by its points, `_PER_POINT` each: 4 points weigh about as
much as 15 % of time. Speedups of one row share the run that they were taken over, and its error with it, so what they
have in common counts less than what sets them apart. One set of constants serves all tables that are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.sim.collectives import Case, baseline, baseline_of, program_of
from dovetail.sim.machine import NUMBERS, Machine, MachineError, Origin, Source
from dovetail.sim.replay import native, price
from dovetail.sim.result import Result
from dovetail.sim.tables import Figure, Target

_PER_POINT = 0.04
_SHARED = 0.7  # what counts of the error that all speedups of a row have in common: it may be their baseline's
_STEP = 0.04  # of a logarithm, for slopes: constants are rounded to nanoseconds
_MOST_STEPS = 40
_ENOUGH = 1e-4
Floats = NDArray[np.float64]
#: Is told how many steps are done, of at most how many, and the error so far.
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A target and what the machine says."""

    target: Target
    value: float
    held_out: bool = False

    @property
    def log_error(self) -> float:
        """Of a time or a speedup; positive where the model is above the table."""
        return math.log(self.value / self.target.value)

    @property
    def points(self) -> float:
        """Of a share: percentage points above the table."""
        return self.value - self.target.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How well a set of predictions meets its targets; outliers that a table names are left out."""

    entries: int
    rms_log: float  #: root mean square of the log errors
    within_15: float  #: share of the entries within 15 %
    within_25: float
    rows: int  #: phase rows
    worst_points: tuple[float, ...]  #: of each phase row, the largest deviation in points


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A machine with refitted constants, and its predictions for all targets."""

    machine: Machine
    free: tuple[str, ...]
    predicted: tuple[Predicted, ...]


def predict(machine: Machine, targets: Sequence[Target]) -> list[Predicted]:
    """What `machine` says of every target."""
    results: dict[Case, Result] = {}
    steps = native(machine)

    def run(case: Case) -> Result:
        if case not in results:
            results[case] = price(program_of(case, steps), machine)
        return results[case]

    found = []
    for target in targets:
        mine = run(target.case)
        if target.figure is Figure.SHARE:
            assert target.phase is not None
            value = 100 * mine.shares()[target.phase]
        elif target.figure is Figure.SPEEDUP:
            value = run(baseline_of(target.case)).time_ns / mine.time_ns
        else:
            value = mine.time_us
        found.append(Predicted(target=target, value=value))
    return found


def errors(predicted: Sequence[Predicted]) -> Errors:
    """The errors of a set of predictions."""
    logs = np.array([p.log_error for p in predicted if p.target.figure is not Figure.SHARE and not p.target.outlier])
    ratio = np.abs(np.expm1(logs))
    rows: dict[tuple[object, ...], float] = {}
    for p in predicted:
        if p.target.figure is Figure.SHARE:
            row = _row(p.target)
            rows[row] = max(rows.get(row, 0.0), abs(p.points))
    return Errors(
        entries=len(logs),
        rms_log=float(np.sqrt(np.mean(logs**2))) if len(logs) else 0.0,
        within_15=float(np.mean(ratio <= 0.15)) if len(logs) else 1.0,
        within_25=float(np.mean(ratio <= 0.25)) if len(logs) else 1.0,
        rows=len(rows),
        worst_points=tuple(rows.values()),
    )


def winners(predicted: Sequence[Predicted], margin: float = 0.05) -> tuple[int, list[tuple[int, str, str]]]:
    """How many sizes a table of speedups has, and those where what the model calls fastest is not.

    A variant counts as fastest if the table has it within `margin` of the fastest. Misses are (size, the model's
    fastest, the table's).
    """
    sizes: dict[tuple[object, ...], dict[str, tuple[float, float]]] = {}
    for p in predicted:
        if p.target.figure is Figure.SPEEDUP and not p.target.outlier:
            row = sizes.setdefault(_row(p.target), {baseline(p.target.case.collective): (1.0, 1.0)})
            row[p.target.name] = (p.target.value, p.value)
    misses = []
    for (*_, size), row in sizes.items():
        said = max(row, key=lambda name: row[name][1])
        fastest = max(row, key=lambda name: row[name][0])
        if row[said][0] < row[fastest][0] * (1 - margin):
            misses.append((int(str(size)), said, fastest))
    return len(sizes), sorted(misses)


def halves(targets: Sequence[Target]) -> tuple[list[Target], list[Target]]:
    """Every second size of each table, beginning with the first; and the others."""
    sizes: dict[tuple[object, ...], list[int]] = {}
    for t in targets:
        sizes.setdefault(_table(t), []).append(t.case.total_bytes)
    used = {key: set(sorted(set(found))[::2]) for key, found in sizes.items()}
    mine = [t for t in targets if t.case.total_bytes in used[_table(t)]]
    return mine, [t for t in targets if t.case.total_bytes not in used[_table(t)]]


def _table(target: Target) -> tuple[object, ...]:
    return target.case.collective, target.case.ranks, target.figure


def _row(target: Target) -> tuple[object, ...]:
    return *_table(target), target.case.total_bytes


def fit(
    machine: Machine,
    targets: Sequence[Target],
    *,
    free: Sequence[str] | None = None,
    note: str = "a table that was given",
    progress: Progress | None = None,
) -> Fit:
    """Refits on half of the sizes.

    Args:
        free: the constants that may change; by default those whose origin is `fitted`, without those that change
            nothing in the targets.
        note: where the targets come from, for the sources of the new constants.

    Raises:
        MachineError: nothing is free, or a free constant is zero (its logarithm is fitted) or a whole number.
        ValueError: there are fewer targets than free constants, or one that was named changes nothing.
    """
    names = tuple(machine.fitted() if free is None else free)
    if not names:
        raise MachineError(f"machine {machine.name} has no fitted constant: name those that may change (--free)")
    if whole := [name for name in names if name in NUMBERS and NUMBERS[name][1]]:
        raise MachineError(f"machine {machine.name}: {whole[0]} is a whole number, and is set, not fitted")
    if zero := [name for name in names if machine.value(name) <= 0]:
        raise MachineError(f"machine {machine.name}: {zero[0]} is zero; give it a first guess above zero to fit it")
    used, held = halves(targets)
    counted = [t for t in used if not t.outlier]
    idle = _idle(machine, names, counted)
    if idle and free is not None:
        raise ValueError(f"{idle[0]} changes nothing in these tables, so it can't be fitted to them: free others")
    names = tuple(name for name in names if name not in idle)
    if len(counted) < len(names) or not names:
        raise ValueError(f"{len(counted)} entries can't fix {len(names)} constants; give more, or free fewer")
    best = _least_squares(_residuals(machine, names, counted), _logs(machine, names), progress)
    source = Source(origin=Origin.FITTED, note=note)
    rounded = {name: float(f"{value:.4g}") for name, value in zip(names, np.exp(best).tolist(), strict=True)}
    found = machine.replace(rounded, source)
    predicted = predict(found, used) + [
        Predicted(target=p.target, value=p.value, held_out=True) for p in predict(found, held)
    ]
    return Fit(machine=found, free=names, predicted=tuple(predicted))


def _logs(machine: Machine, names: Sequence[str]) -> Floats:
    return np.log([machine.value(name) for name in names])


def _residuals(machine: Machine, names: Sequence[str], targets: Sequence[Target]) -> Callable[[Floats], Floats]:
    """What is made small, as a function of the constants' logarithms."""
    rows = _rows(targets)

    def residuals(logs: Floats) -> Floats:
        there = machine.replace(dict(zip(names, np.exp(logs).tolist(), strict=True)))
        found = np.array([_residual(p) for p in predict(there, targets)])
        for row in rows:
            found[row] -= (1 - _SHARED) * found[row].mean()
        return found

    return residuals


def _idle(machine: Machine, names: Sequence[str], targets: Sequence[Target]) -> list[str]:
    """The constants that no entry depends on: a value for them would be made up."""
    residuals, start = _residuals(machine, names, targets), _logs(machine, names)
    before = residuals(start)
    return [
        name
        for name, unit in zip(names, np.eye(len(names)), strict=True)
        if np.array_equal(residuals(start + unit), before) and np.array_equal(residuals(start - unit), before)
    ]


def _rows(targets: Sequence[Target]) -> list[list[int]]:
    """Speedups that were taken over one and the same run of the baseline."""
    rows: dict[tuple[object, ...], list[int]] = {}
    for n, t in enumerate(targets):
        if t.figure is Figure.SPEEDUP:
            rows.setdefault(_row(t), []).append(n)
    return list(rows.values())


def _residual(p: Predicted) -> float:
    return p.points * _PER_POINT if p.target.figure is Figure.SHARE else p.log_error


def _least_squares(residuals: Callable[[Floats], Floats], start: Floats, progress: Progress | None) -> Floats:
    """Levenberg and Marquardt's method with numeric slopes."""
    at, r = start, residuals(start)
    damping = 1e-2
    for step in range(_MOST_STEPS):
        if progress is not None:
            progress(step, _MOST_STEPS, float(np.sqrt(np.mean(r**2))))
        slopes = np.stack([(residuals(at + _STEP * unit) - r) / _STEP for unit in np.eye(len(at))], axis=1)
        gained, error = 0.0, float(r @ r)
        while error and damping < 1e6:
            normal = slopes.T @ slopes
            damped = normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(len(at)))
            move = np.linalg.solve(damped, -slopes.T @ r)
            trial = at + np.clip(move, -1.0, 1.0)
            new = residuals(trial)
            if (gained := 1 - float(new @ new) / error) > 0:
                at, r, damping = trial, new, damping / 5
                break
            damping *= 4
        if gained < _ENOUGH:
            break
    return at
