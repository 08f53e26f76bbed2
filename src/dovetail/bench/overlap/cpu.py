"""The site of the bench in one rank of several on a CPU: threads, our software engines, collectives between ranks.

Owns the rank's tensors, and the core of its main thread, one for each rank as a launcher would bind them: threads that
wander meet on one core and wait for each other there. Other threads go where the strategy lets them. Computations run
on one thread. All ranks call everything in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import dovetail
from dovetail.bench.cases import Case, same_bits
from dovetail.bench.overlap.spec import Compute, Job
from dovetail.bench.overlap.work import TorchWork, Work
from dovetail.overlap.collective import Collective
from dovetail.overlap.cpu import CpuPlace
from dovetail.overlap.strategy import Setting, Strategy
from dovetail.overlap.tasks import Call, Communication, Computation, Mover
from dovetail.overlap.timing import CpuTimer, Times

_POISON = -77
_MEMORY_ELEMENTS = 8 << 20
_ALL_CORES = Setting(Strategy.SERIAL)


class RankLink:
    """A collective on symmetric tensors, with its check."""

    def __init__(self, collective: str, ranks: int, rank: int, size_bytes: int) -> None:
        self._case = Case.of(collective, ranks, size_bytes, "float32")
        self._rank, self._iteration = rank, 0
        case = self._case
        self._input: Any = dovetail.empty(case.num_elements, dtype=case.torch_dtype)
        self._output: Any = self._input if case.in_place else dovetail.empty(case.num_output, dtype=case.torch_dtype)
        self._input.zero_()
        functions: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            "all_gather": (dovetail.all_gather_into_tensor, (self._output, self._input)),
            "all_to_all": (dovetail.all_to_all_single, (self._output, self._input)),
            "all_reduce": (dovetail.all_reduce, (self._input,)),
            "reduce_scatter": (dovetail.reduce_scatter_tensor, (self._output, self._input)),
        }
        function, tensors = functions[collective]
        self.comm = Collective(function, *tensors)
        self.crossing_bytes = self.comm.traffic.size_bytes

    def fresh(self) -> None:
        """New data for the next checks."""
        self._iteration += 1

    def check(self, mover: Mover) -> bool:
        """Moves it once and compares, to the last bit."""
        self._output.fill_(_POISON)
        self._input.copy_(self._case.input(self._rank, self._iteration))
        pending = self.comm.start(mover)
        if pending is not None:
            pending.wait()
        return same_bits(self._output, self._case.expected(self._rank, self._iteration))

    def close(self) -> None:
        """All ranks are here before the memory is given back; nothing is left in it."""
        dovetail.barrier()


class CpuSite:
    """What a rank measures with. An owner: `close()`, or `with`."""

    backend, device_name = "cpu", ""

    def __init__(self, rank: int, ranks: int, meet: Callable[[], None]) -> None:
        torch.set_num_threads(1)
        self.ranks, self._rank, self._meet = ranks, rank, meet
        self.place = CpuPlace()
        self._cores = self.place.compute_cores(_ALL_CORES)
        self._core = self._cores[0]  # of each rank another one
        self.timer = CpuTimer(self.place, self._start)
        self._work: tuple[Compute, Work] | None = None
        self._link: RankLink | None = None

    def work(self, compute: Compute) -> Work:
        """The computation; the one before it is given back."""
        if self._work is None or self._work[0] != compute:
            self._work = compute, self.make(compute)
        return self._work[1]

    def make(self, compute: Compute) -> Work:
        """A new one."""
        return TorchWork(compute, self.backend)

    def pieces(self, job: Job) -> int:
        """Of a tensor: one for each rank."""
        return self.ranks

    def link(self, job: Job, piece_bytes: int) -> RankLink:
        """The communication; the one before it is given back."""
        if self._link is not None:
            self._link.close()
        whole = piece_bytes * (1 if job.small == "all_gather" else self.ranks)
        self._link = RankLink(job.small, self.ranks, self._rank, whole)
        return self._link

    def check(self, made: RankLink, mover: Mover) -> bool:
        """Moves it once, and looks."""
        return made.check(mover)

    # --- runs

    def _start(self) -> None:
        """What the timer calls after the strategy has shared the cores out."""
        os.sched_setaffinity(0, {self._core})
        self._meet()

    def _prepare(self, setting: Setting) -> None:
        """Before a run: which core is the main thread's, of those that a computation has."""
        self.place.prepare(setting)
        self._core = self.place.compute_cores(setting)[0]

    def warm(self, work: Computation, comm: Communication, setting: Setting | None) -> None:
        """Runs it once, all ranks together; None: the computation alone."""
        if setting is None:
            work()
        else:
            self.both(work, comm, setting)

    def repeat(self, work: Computation, comm: Communication, setting: Setting, number: int) -> None:
        """The pair so often, one after the other."""
        for _ in range(number):
            self.place.launch(work, comm, setting)

    def compute_us(self, work: Computation) -> float:
        """Alone, on any core."""
        self._prepare(_ALL_CORES)
        return self.timer.compute(work)

    def comm_us(self, comm: Communication, mover: Mover) -> float:
        """Alone, on any core."""
        self._prepare(_ALL_CORES)
        return self.timer.comm(comm, mover)

    def both(self, work: Computation, comm: Communication, setting: Setting) -> Times:
        """Together."""
        self._prepare(setting)
        return self.timer.both(work, comm, setting)

    def agree(self, values: list[float]) -> list[float]:
        """The greatest of all ranks, each by itself: all go on with the same figures."""
        mine = torch.tensor(values, dtype=torch.float64)
        every = torch.empty(self.ranks * len(values), dtype=torch.float64)
        dovetail.all_gather_into_tensor(every, mine)
        found: list[float] = every.view(self.ranks, len(values)).amax(0).tolist()
        return found

    def memory_bytes_per_s(self) -> float | None:
        """What one thread reaches that streams, while all ranks do."""
        a, b = (torch.zeros(_MEMORY_ELEMENTS) for _ in range(2))
        out = torch.empty_like(a)

        def add() -> None:
            torch.add(a, b, out=out)

        add()
        times = sorted(self.compute_us(Call(add)) for _ in range(3))
        return 3 * a.nbytes / self.agree(times)[1] * 1e6

    def close(self) -> None:
        """Ends the thread. Safe to call twice."""
        self._link = self._work = None
        self.timer.close()
        self.place.close()
        os.sched_setaffinity(0, self._cores)

    def __enter__(self) -> CpuSite:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
