"""A collective beside a computation on GPU ranks, over the stand-in driver: ranks that share a GPU, and ranks that have
one each. Right results by every strategy under delays, one choice on all ranks, and the slowest rank's.

The stand-in shows two GPUs, so what a rank calls its own is a matter of its index. torch sees none of them: here a stub
of its streams says which raw stream is current, and tensors count as a GPU's by where their memory is.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import dovetail
from dovetail import overlap
from dovetail.coll import arguments, baseline, choose
from dovetail.errors import NotSupported
from dovetail.hw.gpu import tensors
from dovetail.hw.gpu.driver import WAIT, WORD, Kind
from dovetail.hw.gpu.world import world_of
from dovetail.overlap import Load, Mover, Runtime, Strategy
from dovetail.overlap.contenders import ROUNDS_BEFORE_KEPT
from dovetail.overlap.policy import DEFAULT_DMA_BYTES
from tests.ranks import workers
from tests.ranks.conftest import Pool
from tests.ranks.gpuranks import environment

WORLD = 2
N = DEFAULT_DMA_BYTES // 4  # floats of a rank: enough for `dma` to be the first choice
AVAILABLE = ("serial", "dma", "dma+partition")
COLLECTIVES = ("all_gather_into_tensor", "all_to_all_single", "all_reduce", "reduce_scatter_tensor")


class Side:
    """A rank: its GPU, its own current stream, and the stub of torch's streams."""

    def __init__(self, *, one_gpu: bool) -> None:
        self.group = workers.world()
        index = 0 if one_gpu else self.group.rank
        self.side = world_of(self.group.world, "cuda", index)
        self.device, self.driver = self.side.device, self.side.device.driver
        self.main = self.current = self.driver.stream_create()
        choose.untested = lambda told, device: None
        arguments.one_device = self._one_device
        tensors.current_stream = lambda _: self.current
        torch.cuda.ExternalStream = lambda stream, device=None: stream  # type: ignore[assignment,misc]
        torch.cuda.stream = self._stream  # type: ignore[assignment]

    def _one_device(self, given: Any) -> tuple[str, int]:
        kinds = {self.driver.memory_at(t.data_ptr()).kind for t in given if t.numel()}
        return ("cuda", self.device.index) if Kind.DEVICE in kinds else ("cpu", -1)

    @contextlib.contextmanager
    def _stream(self, stream: int) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def empty(self, items: int) -> torch.Tensor:
        return workers.poison(self.side.heap.empty((items,), torch.float32))

    def wait(self) -> None:
        self.driver.stream_synchronize(self.main)


class Case:
    """A collective whose input a stream writes late, and whose output a stream takes away at once."""

    def __init__(self, at: Side, name: str = "all_gather_into_tensor", items: int = N) -> None:
        self.at, self.name, self.items, size = at, name, items, at.group.size
        self.given, self.input, self.kept_input = at.empty(items), at.empty(items), at.empty(items)
        self.num_out = items * size if "gather" in name else items // size if "scatter" in name else items
        self.output, self.kept = at.empty(self.num_out), at.empty(self.num_out)
        self.result, self.byte = at.empty(64), 0
        one = [self.input] if name == "all_reduce" else [self.output, self.input]
        self.comm = overlap.Collective(getattr(dovetail, name), *one)

    def _copy(self, to: torch.Tensor, of: torch.Tensor) -> None:
        self.at.driver.copy(to.data_ptr(), of.data_ptr(), to.nbytes, self.at.main)

    def fill(self, seed: int) -> None:
        """The input comes at the end of the caller's stream."""
        self.seed, self.byte = seed, seed % 200 + 1
        self.given.copy_(workers.data(seed, self.at.group.rank, self.items, torch.float32))
        for t in (self.output, self.kept, self.kept_input):
            workers.poison(t)
        for _ in range(4):
            self.at.driver.fill(self.input.data_ptr(), 0, self.input.nbytes, self.at.main)
        self._copy(self.input, self.given)

    def computation(self, runtime: Runtime) -> overlap.Call:
        def compute() -> int:
            place: Any = runtime.place
            self.at.driver.fill(self.result.data_ptr(), self.byte, self.result.nbytes, place.stream)
            return self.byte

        return overlap.Call(compute, Load(name="fill", flops=1e6))

    def take(self) -> None:
        """What follows in the caller's stream: both results are copied and overwritten."""
        self._copy(self.kept, self.output)
        self._copy(self.kept_input, self.input)
        for t in (self.output, self.input):
            self.at.driver.fill(t.data_ptr(), 0, t.nbytes, self.at.main)

    def is_right(self) -> bool:
        rank, size = self.at.group.rank, self.at.group.size
        each = [workers.data(self.seed, r, self.items, torch.float32) for r in range(size)]
        mine = slice(rank * self.items // size, (rank + 1) * self.items // size)
        if set(workers.bits(self.result).tolist()) != {self.byte}:
            return False
        if self.name == "all_gather_into_tensor":
            return torch.equal(self.kept, torch.cat(each))
        if self.name == "all_to_all_single":
            return torch.equal(self.kept, torch.cat([data[mine] for data in each]))
        total = workers.reduced(each, "sum")
        return torch.equal(self.kept_input, total) if "all" in self.name else torch.equal(self.kept, total[mine])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """Runs a job on ranks of one kind; a rank has one GPU for life, so kinds have pools of their own."""
    pools: dict[bool, Pool] = {}

    def run(one_gpu: bool, job: Callable[..., Any], *args: Any) -> list[Any]:
        if one_gpu not in pools:
            for other in list(pools):
                pools.pop(other).close()
            pools[one_gpu] = Pool(WORLD, environment(STANDIN_DEVICES=2, STANDIN_CORES=132, STANDIN_DELAY_US=100))
        return pools[one_gpu].run(lambda: job(Side(one_gpu=one_gpu), *args))

    yield run
    for pool in pools.values():
        pool.close()


def test_ranks_on_one_gpu(ranks: Any) -> None:
    """Inside one GPU engines do nothing: `auto` runs one after the other, and says why."""

    def job(at: Side) -> list[str]:
        case = Case(at)
        assert case.comm.traffic.local
        assert case.comm.movers == {Mover.ENGINES}
        assert case.comm.device is at.device
        said = []
        with Runtime(at.device) as runtime:
            for seed in range(6):
                case.fill(seed)
                outcome = runtime.run(case.computation(runtime), case.comm)
                case.take()
                assert outcome.wait() == case.byte
                at.wait()
                assert case.is_right()
                said.append(f"{outcome.setting}: {outcome.reason}")
        return said

    first, second = ranks(True, job)
    assert first == second
    assert len(set(first)) == 1
    assert first[0].startswith("serial by engines: ")
    assert "inside one GPU engines do nothing" in first[0]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_strategy_gives_the_same(ranks: Any, name: str) -> None:
    """A GPU each: both come behind the late input, and what follows comes behind both."""

    def job(at: Side) -> list[str]:
        case = Case(at, name, 6000)
        assert not case.comm.traffic.local
        wrong = []
        with Runtime(at.device) as runtime:
            for seed, strategy in itertools.product(range(4), AVAILABLE):
                case.fill(10 * AVAILABLE.index(strategy) + seed)
                outcome = runtime.run(case.computation(runtime), case.comm, strategy)
                case.take()
                outcome.wait()
                at.wait()
                if outcome.strategy != strategy or not case.is_right():
                    wrong.append(f"{strategy} {seed}")
            for strategy in set(Strategy) - {Strategy(s) for s in AVAILABLE} - {Strategy.FUSED}:
                with pytest.raises(NotSupported, match="can't be moved by cores"):
                    runtime.run(case.computation(runtime), case.comm, strategy)
        return wrong

    assert ranks(False, job) == [[]] * WORLD


def test_the_with_form(ranks: Any) -> None:
    def job(at: Side) -> None:
        case = Case(at)
        with Runtime(at.device) as runtime:
            for seed, strategy in enumerate(("auto", *AVAILABLE) * 2):
                case.fill(seed)
                compute = case.computation(runtime)
                with runtime.beside(case.comm, strategy) as outcome:
                    compute()
                case.take()
                outcome.wait()
                at.wait()
                assert case.is_right(), strategy

    ranks(False, job)


def test_all_ranks_choose_alike_and_by_the_slowest(ranks: Any) -> None:
    """`dma` ends late on rank 1 alone, all else on rank 0 alone, less late: rank 0 must not keep what is best there.

    A stream stands before a word that a thread raises; it comes behind the collective, so that no peer waits for it.
    """

    def job(at: Side) -> tuple[list[str], str]:
        case, rank = Case(at), at.group.rank
        word = at.device.pinned(8).array.view(np.uint64)
        word[0], rows, start = 0, np.zeros(1, WORD), case.comm.start
        rows["kind"], rows["address"] = WAIT, word.ctypes.data

        def late(mover: Any, *, stream: int = 0, cores: int = 0) -> Any:
            by_dma = stream != at.main and cores == 0
            late_s = (0.06 if rank == 1 else 0.0) if by_dma else (0.02 if rank == 0 else 0.0)
            pending = start(mover, stream=stream, cores=cores)
            if late_s:
                rows["value"] += 1
                at.driver.stream_words(rows, stream)
                threading.Timer(late_s, word.__setitem__, (0, int(rows["value"][0]))).start()
            return pending

        case.comm.start = late  # type: ignore[method-assign]
        taken = []
        with Runtime(at.device) as runtime:
            first = str(runtime.explain(case.computation(runtime), case.comm).order[0])
            for seed in range(ROUNDS_BEFORE_KEPT + 5):
                case.fill(seed)
                outcome = runtime.run(case.computation(runtime), case.comm)
                case.take()
                outcome.wait()
                at.wait()
                assert case.is_right()
                taken.append(str(outcome.setting))
                dovetail.barrier()
        return taken, first

    (one, best), (other, _) = ranks(False, job)
    assert best == "dma"
    assert one == other
    assert {"dma", "serial by engines"} <= set(one)
    assert len(set(one[-5:])) == 1
    assert one[-1] != "dma"


class Library:
    """A process group's own library on the stand-in: gloo, and its result late in the current stream. As NCCL's,
    `wait` and `synchronize` of its calls don't block the host."""

    def __init__(self, at: Side, tensors: tuple[torch.Tensor, ...], call: Callable[..., Any]) -> None:
        at.driver.stream_synchronize(at.current)
        self._staged = [at.empty(t.numel()).copy_(t) for t in tensors]
        call(tuple(self._staged)).wait()
        out = tensors[0]
        for _ in range(8):
            at.driver.fill(out.data_ptr(), 255, out.nbytes, at.current)
        at.driver.copy(out.data_ptr(), self._staged[0].data_ptr(), out.nbytes, at.current)

    def wait(self) -> bool:
        return True

    synchronize = wait


def test_by_a_library(ranks: Any) -> None:
    """By cores is the process group's own library, in the stream of the communication; the host can wait for it."""

    def job(at: Side) -> list[str]:
        plain, calls = baseline.run, []
        at.group.baseline = baseline.process_group(at.group)

        def run(group: Any, collective: Any, given: Any, **more: Any) -> Library:
            calls.append(at.current)
            return Library(at, given, lambda staged: plain(group, collective, staged, **more))

        baseline.run = run
        case, wrong = Case(at, items=6000), []
        try:
            with Runtime(at.device) as runtime:
                for seed, strategy in enumerate(s for s in Strategy if s is not Strategy.FUSED):
                    case.fill(seed)
                    calls.clear()
                    outcome = runtime.run(case.computation(runtime), case.comm, strategy)
                    outcome.wait()
                    if len(calls) != (outcome.setting.moved_by is Mover.CORES) or at.main in calls:
                        wrong.append(f"{strategy}: {len(calls)} calls of the library")
                    each = [workers.data(seed, r, 6000, torch.float32) for r in range(WORLD)]
                    if not torch.equal(case.output, torch.cat(each)):
                        wrong.append(f"{strategy}: the host did not wait")
                    case.take()
                    at.wait()
                    if not case.is_right():
                        wrong.append(strategy)
        finally:
            baseline.run, at.group.baseline = plain, None
        return wrong

    assert ranks(False, job) == [[]] * WORLD


def test_a_library_needs_gpus_for_all_ranks(ranks: Any) -> None:
    """Who has a process group may have it move by cores, but not where ranks share a GPU."""

    def job(at: Side) -> list[Mover]:
        at.group.baseline = object()
        try:
            return sorted(Case(at, items=8).comm.movers)
        finally:
            at.group.baseline = None

    assert ranks(False, job) == [sorted(Mover)] * WORLD
    assert ranks(True, job) == [[Mover.ENGINES]] * WORLD
