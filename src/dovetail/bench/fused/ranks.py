"""`dovetail bench fused` between ranks, on a CPU or sharing GPUs: every way to run an operator with its collective,
side by side.

Owns the processes, the order of a measurement (checked, warmed, timed in balanced orders, checked again) and the rows.
A round's time is that of its slowest rank, a contender's the median over rounds; ratios that are to tell small
differences are medians over the rounds' own ratios.

Ranks are bound to cores as a launcher would do it and have as many threads as cores; ranks beyond the cores share them.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import dovetail
from dovetail import env
from dovetail.bench import start
from dovetail.bench.baselines import fbgemm
from dovetail.bench.folder import Folder
from dovetail.bench.fused import ablate
from dovetail.bench.fused.cases import Case, LookupCase, Run, case_of
from dovetail.bench.fused.grid import DTYPES, GATHER, GEMV, SCATTER, Shape, coarse, grid, quick
from dovetail.bench.load import Others
from dovetail.measure import cores
from dovetail.measure.interleave import interleave
from dovetail.measure.stats import median
from dovetail.ops import choose

Row = dict[str, Any]
Progress = Callable[[int, int, str], None]
#: What is compared with: torch's operator and gloo's collective, or ours, as a user would write it; each side alone.
GLOO, OURS, COMPUTE, COMM = "gloo", "torch+ours", "compute", "comm"
FBGEMM, FBGEMM_OURS = "fbgemm+gloo", "fbgemm+ours"
#: `store` on GPUs, captured in a graph once and replayed: what a decoding loop does.
GRAPH = "graph"
_CAPTURED = (GEMV, GATHER, SCATTER)
_POLL_S = 0.05
_CHECKS = 2
_WARM_UP = 2
_FEWEST, _QUICK_FEWEST, _MOST = 9, 3, 201


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """A measurement."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...] = DTYPES
    ranks: int = 2
    transports: tuple[str, ...] = ()
    """Beside unfused; none: all that an operator has."""
    rounds: int | None = None
    """As many as fit into the time if not given."""
    fewest: int = _FEWEST
    seconds: float = 1.0
    """For all contenders of a shape together; the fewest rounds may take longer."""
    passes: int = 1
    """All shapes are measured so often, one after the other: of each the quietest measurement counts."""
    limit_s: float | None = None
    """For everything: what has not begun by then is left out."""
    baselines: bool = True
    """Also gloo, FBGEMM, and the two sides alone."""
    ablate: bool = False
    backend: str = "cpu"
    """Where tensors are: "cpu", or "cuda" for ranks that share GPUs."""

    def __post_init__(self) -> None:
        if not self.shapes or not self.dtypes:
            raise ValueError("there must be a shape and a dtype to measure")
        if not 2 <= self.ranks <= 64:
            raise ValueError(f"--ranks: {self.ranks} must be 2 to 64")
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"--iters: {self.rounds} must be at least 1")
        for name in self.transports:
            if name not in (choose.AUTO, *choose.NAMES):
                raise ValueError(f"--transport: {name!r} is not known; there are {', '.join(choose.NAMES)}")

    def contenders(self, op: str) -> list[str]:
        """Ours, in the order in which they are shown."""
        has = [name for name in choose.TRANSPORTS[self.backend][op] if not self.transports or name in self.transports]
        return list(dict.fromkeys([choose.UNFUSED, *has, *([choose.AUTO] if self.baselines else [])]))


def spec_of(ops: Sequence[str], *, short: bool, backend: str = "cpu", **more: Any) -> RankSpec:
    """The grid of some operators, or a miniature of it."""
    if short:
        return RankSpec(shapes=quick(ops), seconds=0.1, fewest=_QUICK_FEWEST, backend=backend, **more)
    return RankSpec(shapes=grid(ops, backend), backend=backend, **more)


def tune_spec(ops: Sequence[str], ranks: int, budget_s: float, backend: str = "cpu") -> RankSpec:
    """What is measured for choices, twice: others on the machine may take a core for longer than a shape has. About
    half of the time goes into arguments, checks and first calls."""
    shapes, passes = coarse(ops, backend), 2
    seconds = min(0.5, budget_s / 2 / passes / len(shapes) / len(DTYPES))
    return RankSpec(
        shapes=shapes, ranks=ranks, seconds=seconds, fewest=_QUICK_FEWEST, limit_s=budget_s, baselines=False,
        backend=backend, passes=passes,
    )  # fmt: skip


class Measured(NamedTuple):
    """What came of it."""

    rows: list[Row]
    notes: list[str]

    @property
    def correct(self) -> bool:
        """Whether every result was right."""
        return all(row["correct"] for row in self.rows)


def measure(spec: RankSpec, progress: Progress | None = None) -> Measured:
    """Starts the ranks, follows them and brings back what they measured.

    Raises:
        DovetailError: a rank failed.
    """
    from dovetail.bench.load import BUSY_SHARE

    others = Others()
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as name:
        folder = Folder(Path(name))
        start.make(folder.start, spec.ranks)
        over = threading.Event()

        def follow() -> None:
            heard = 0
            while not over.wait(_POLL_S):
                if progress and len(reports := folder.progress()) > heard:
                    heard = len(reports)
                    progress(*reports[-1])

        follower = threading.Thread(target=follow, name="dovetail-bench-progress", daemon=True)
        follower.start()
        try:
            rows, notes = dovetail.launch(_rank, ranks=spec.ranks, args=(name, spec))[0]
        finally:
            over.set()
            follower.join()
    share = others.share()
    for row in rows:
        row["others_share"] = None if share is None else round(share, 3)
    if share is not None and share >= BUSY_SHARE:
        notes.append(f"the machine was busy: others took {share:.0%} of its cores' time; measure again")
    return Measured(rows, notes)


def _rank(name: str, spec: RankSpec) -> tuple[list[Row], list[str]]:
    """What a rank does; all return the same."""
    began = time.monotonic()
    group, folder = dovetail.init(), Folder(Path(name))
    rank, ranks = group.rank, group.size
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=env.timeout_s())
    store = FileStore(str(folder.store), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    threads = _bind(rank, ranks)  # not gloo's own, which have begun: they run where there is room, as under torchrun
    line = start.StartLine(
        folder.start, rank, ranks, share_cores=ranks > cores.usable(), timeout_s=env.timeout_s()
    )  # fmt: skip
    if spec.backend != "cpu":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    site = Site(spec, rank, ranks, threads, line)
    cells = [(shape, dtype) for shape in spec.shapes for dtype in spec.dtypes]
    found: list[list[Row]] = []
    for done, (shape, dtype) in enumerate(cells * spec.passes):
        if rank == 0:
            folder.report(done, len(cells) * spec.passes, f"{shape.op} {shape.name} {dtype}")
        if spec.limit_s is not None and site.agree(time.monotonic() - began)[0] > spec.limit_s:
            if done < len(cells):
                site.notes[f"out of time: {len(cells) - done} of {len(cells)} cases were not measured"] = None
            break
        measured = site.rows(shape, dtype)
        if done < len(cells):
            found.append(measured)
        else:
            before = found[done % len(cells)]
            before[:] = [quieter(*pair) for pair in zip(before, measured, strict=True)]
    line()
    dist.destroy_process_group()
    line.close()
    return [row for rows in found for row in rows], list(site.notes)


def quieter(one: Row, other: Row) -> Row:
    """Of two measurements of the same that in which calls took less: others on the machine only make them longer. What
    was wrong in either has no time."""
    both = one["times_us"].keys() & other["times_us"].keys()
    kept = min(one, other, key=lambda row: sum(math.log(row["times_us"][name]) for name in both))
    wrong = [*one["wrong"], *(name for name in other["wrong"] if name not in one["wrong"])]
    right = {
        figure: {name: value for name, value in kept[figure].items() if name in both}
        for figure in ("times_us", "over_unfused", "over_ours")
    }
    return kept | right | {"wrong": wrong, "correct": not wrong}


def _bind(rank: int, ranks: int) -> int:
    """To this rank's share of the cores, one at least; returns how many threads it has for them."""
    own = cores.physical()
    each = max(1, min(len(own), cores.usable()) // ranks)
    mine = [own[(rank * each + k) % len(own)] for k in range(each)]
    os.sched_setaffinity(0, set().union(*mine))
    torch.set_num_threads(each)
    return each


class Site:
    """What a rank measures with."""

    def __init__(self, spec: RankSpec, rank: int, ranks: int, threads: int, line: Callable[[], None]) -> None:
        self.spec, self.rank, self.ranks, self._threads, self._start = spec, rank, ranks, threads, line
        self.notes: dict[str, None] = {}

    def agree(self, value: Any) -> list[Any]:
        """Everybody's."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def rows(self, shape: Shape, dtype: str) -> list[Row]:
        """One row of the contenders, and those of the ablations."""
        case = case_of(shape, dtype, self.rank, self.ranks, self.spec.backend)
        operations, size = case.made().load
        row: Row = {
            "row": "shape", "backend": self.spec.backend, "op": shape.op, "shape": shape.name, "sizes": shape.sizes,
            "uneven": shape.uneven, "dtype": dtype, "ranks": self.ranks, "threads": self._threads,
            "operations": operations, "size_bytes": size,
        }  # fmt: skip
        found = self.timed(case, self._contenders(shape, case))
        if self.spec.baselines:
            row["auto"] = dict(zip(("transport", "reason"), case.explain(), strict=True))
        more: list[Row] = []
        if self.spec.ablate and dtype == self.spec.dtypes[0]:
            base = {name: row[name] for name in ("backend", "op", "shape", "sizes", "dtype", "ranks", "threads")}
            late_us = found["times_us"].get(choose.UNFUSED, 0.0)  # as long as an unfused call takes
            for what, contenders in ablate.contenders(case, late_us, self.rank).items():
                late = {"late_us": late_us} if what == ablate.SKEW else {}
                more.append(base | {"row": what} | late | self.timed(case, contenders))
        return [row | found, *more]

    def _contenders(self, shape: Shape, case: Case) -> dict[str, Run]:
        """By name; all ranks have the same."""
        found: dict[str, Run] = {name: case.fused(name) for name in self.spec.contenders(shape.op)}
        on_gpus = self.spec.backend != "cpu"
        if self.spec.baselines:
            found |= {OURS: case.then(dovetail), COMPUTE: case.compute(), COMM: case.comm()}
            if on_gpus and choose.STORE in found and shape.op in _CAPTURED:
                found[GRAPH] = _captured(found[choose.STORE])
        if on_gpus:
            return {name: _settled(run) for name, run in found.items()}
        if not self.spec.baselines:
            return found
        found[GLOO] = case.then(dist)
        if isinstance(case, LookupCase):
            found |= self._fbgemm(case)
        return found

    def _fbgemm(self, case: LookupCase) -> dict[str, Run]:
        problem = fbgemm.missing()
        if problem is None:
            try:
                pooled = fbgemm.pooled(case.tables, case.values, case.offsets)
                pooled()
                return {FBGEMM: case.then(dist, pooled), FBGEMM_OURS: case.then(dovetail, pooled)}
            except (NotImplementedError, RuntimeError) as error:
                problem = f"it can't pool {case.dtype}: {str(error).splitlines()[0]}"
        self.notes[f"fbgemm left out: {problem}"] = None
        return {}

    def timed(self, case: Case, contenders: dict[str, Run]) -> Row:
        """Checked, timed and checked again: medians, and rounds' ratios to unfused. A wrong one has no time."""
        right = dict.fromkeys(contenders, True)
        for iteration in range(_CHECKS):
            self._check(case, contenders, right, iteration)
        racing = {name: run for name, run in contenders.items() if right[name]}
        rounds = self._rounds(racing)
        times = self._slowest(racing, rounds) if racing else {}
        self._check(case, racing, right, _CHECKS)
        medians = {name: round(median(found) / 1e3, 3) for name, found in times.items() if right[name]}

        def over(rival: str) -> dict[str, float]:
            """Medians of the rounds' own ratios."""
            rivals = times.get(rival)
            return {
                name: round(median([u / t for u, t in zip(rivals, found, strict=True)]), 4)
                for name, found in times.items() if rivals and right[name]
            }  # fmt: skip

        wrong = [name for name in contenders if not right[name]]
        return {
            "times_us": medians, "over_unfused": over(choose.UNFUSED), "over_ours": over(OURS), "rounds": rounds,
            "correct": not wrong, "wrong": wrong,
        }  # fmt: skip

    def _check(self, case: Case, contenders: dict[str, Run], right: dict[str, bool], iteration: int) -> None:
        """On fresh data; who gives any rank a wrong result is out on all of them."""
        case.fresh(iteration)
        wanted = case.expected()
        mine = {
            name: name in (COMPUTE, COMM) or case.is_right(_run(run, self._start), wanted)
            for name, run in contenders.items()
        }
        every = self.agree(mine)
        for name in contenders:
            right[name] &= all(of_rank[name] for of_rank in every)

    def _rounds(self, racing: dict[str, Run]) -> int:
        if self.spec.rounds is not None or not racing:
            return self.spec.rounds or 0
        total = sum(median(found) for found in self._slowest(racing, _WARM_UP).values())
        return int(min(max(self.spec.seconds * 1e9 / total, self.spec.fewest), _MOST))

    def _slowest(self, racing: dict[str, Run], rounds: int) -> dict[str, list[int]]:
        """Nanoseconds of each round, of its slowest rank."""
        every = self.agree(interleave(list(racing.values()), self._start, [rounds] * len(racing)))
        return {
            name: [max(of_round) for of_round in zip(*(of_rank[at] for of_rank in every), strict=True)]
            for at, name in enumerate(racing)
        }


def _captured(run: Run) -> Run:
    """Its first call makes the graph, on all ranks alike; later ones replay it. The result stays where it is."""
    made: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []

    def replay() -> torch.Tensor:
        if not made:
            run()  # what a new shape needs can't be made in a capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run()
            made.append((graph, out))
        graph, out = made[0]
        graph.replay()
        return out

    return replay


def _settled(run: Run) -> Run:
    """Until the GPU is done with it."""

    def both() -> torch.Tensor:
        found = run()
        torch.cuda.synchronize()
        return found

    return both


def _run(run: Run, begin: Callable[[], None]) -> torch.Tensor:
    begin()
    return run()


