"""Pools of real rank processes, kept for the whole test session: a test sends a function to every rank of a pool.

A test that kills, stops or breaks ranks starts its own with `dovetail.launch`, or with `spare_pool`. Ranks are forked
from a server that has imported torch and us, which takes milliseconds where a new interpreter takes seconds.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing as mp
import multiprocessing.connection as mpc
import os
import pickle
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from typing import Any

import cloudpickle
import pytest

LIMIT_S = 100.0
#: What ranks use. None of it reads the environment, which ranks get when they begin.
PRELOADED = (
    "torch", "torch.distributed", "torch.distributed.fsdp", "torch._dynamo", "pytest", "dovetail.coll",
    "dovetail.hw.cpu._native", "dovetail.overlap.calls", "dovetail.overlap.fsdp", "tests.ranks.workers",
)  # fmt: skip


def _serve(pipe: Any, rank: int, env: dict[str, str]) -> None:
    kept = _begin(rank, env)
    import torch

    torch.set_num_threads(1)
    import dovetail

    dovetail.init(timeout=60)
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            kept.clear()
            return
        try:
            fn, args = pickle.loads(job)
            reply = cloudpickle.dumps((True, fn(*args)))
        except BaseException as error:
            reply = cloudpickle.dumps((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        pipe.send_bytes(reply)


def _begin(rank: int, env: dict[str, str]) -> list[Any]:
    """Makes a forked process like one of its own; what is returned shifts all later memory while it is kept.

    Forked processes have the same addresses, so one that a peer can't use would be right by chance.
    """
    os.environ.clear()
    os.environ.update(env)
    if threads := env.get("OMP_NUM_THREADS"):  # the server has imported torch without it
        import torch

        torch.set_num_threads(int(threads))
    gc.freeze()  # what the server has imported is no garbage
    size = (1 << 30) + 17 * rank * mmap.PAGESIZE  # larger than any hole: what comes later lies below it
    mapped = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    return [mapped, *(bytearray(40 << k) for k in range(16) for _ in range(rank))]


def _server() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()  # not later, while `launch` holds Ctrl-C back: all that it forks would not hear it
    return context


def _launched(rank: int, env: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    kept = _begin(rank, env)
    target(*args)
    kept.clear()


class Forked:
    """For `dovetail.launch` in the place of multiprocessing: its processes are forked from the server."""

    def get_context(self, _: str) -> Forked:
        self._context, self._started = _server(), 0
        return self

    def Pipe(self, *, duplex: bool) -> Any:
        return self._context.Pipe(duplex=duplex)

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...], daemon: bool, name: str) -> Any:
        self._started += 1
        job = (self._started, dict(os.environ), target, args)
        return self._context.Process(target=_launched, args=job, daemon=daemon, name=name)


class Pool:
    """`run(fn, *args)` calls the function on every rank and returns what each returned."""

    def __init__(self, ranks: int, more: dict[str, str] | None = None) -> None:
        context = _server()
        token = uuid.uuid4().hex
        self.ranks, self.processes, self.pipes = ranks, [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            env = {
                **os.environ,
                "DOVETAIL_RENDEZVOUS": token,
                "DOVETAIL_RANK": str(rank),
                "DOVETAIL_WORLD_SIZE": str(ranks),
                "DOVETAIL_CHECK": str(int(rank == 0)),  # a plan is that of all ranks: one proof is enough
                "DOVETAIL_HEAP": "2G",
                **(more or {}),
            }
            process = context.Process(target=_serve, args=(theirs, rank, env), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def start(self, fn: Callable[..., Any], *args: Any) -> None:
        """Sends the job; `finish` collects."""
        job = cloudpickle.dumps((fn, args))
        for pipe in self.pipes:
            pipe.send_bytes(job)

    def finish(self, ranks: list[int] | None = None, limit_s: float = LIMIT_S) -> dict[int, Any]:
        """Results of some ranks; fails the test with the first error, or if time is up."""
        waiting = {self.pipes[r]: r for r in (ranks if ranks is not None else range(self.ranks))}
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + limit_s
        while waiting:
            for pipe in mpc.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    good, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    good, value = False, "the process ended"
                (results if good else errors)[rank] = value
            if time.monotonic() > deadline:
                break
        if errors:
            pytest.fail("\n".join(f"rank {r}: {text}" for r, text in sorted(errors.items())), pytrace=False)
        if waiting:
            pytest.fail(f"ranks {sorted(waiting.values())} did not answer in {limit_s:g} s", pytrace=False)
        return results

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Start and finish."""
        self.start(fn, *args)
        done = self.finish()
        return [done[r] for r in range(self.ranks)]

    def close(self) -> None:
        """Ends the processes, by id."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(3)
            if process.is_alive():
                process.kill()
                process.join(3)


class Pools:
    """Makes pools on demand; one stays alive at a time, so that idle ranks cost no memory."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def get(self, ranks: int) -> Pool:
        if self._pool is None or self._pool.ranks != ranks or not all(p.is_alive() for p in self._pool.processes):
            self.close()
            self._pool = Pool(ranks)
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()


@pytest.fixture
def spare_pool() -> Iterator[Callable[..., Pool]]:
    """Pools of a test's own, closed after it."""
    made: list[Pool] = []

    def make(ranks: int, more: dict[str, str] | None = None) -> Pool:
        made.append(Pool(ranks, more))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dovetail.launch` in this process starts its ranks fast: for tests of what they do, not of how they start."""
    monkeypatch.setattr("dovetail.coll.spawn.mp", Forked())


@pytest.fixture(scope="module")
def ready() -> Iterator[Any]:
    """Ranks whose GPU is the stand-in's."""
    from tests.ranks.gpuranks import Ready

    made = Ready()
    yield made
    made.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one pool size follow each other: starting ranks is the expensive part."""

    def size(item: pytest.Item) -> int:
        call = getattr(item, "callspec", None)
        return int(call.params.get("world", 0)) if call is not None else 0

    mine = [i for i in items if "/ranks/" in str(i.path)]
    others = [i for i in items if "/ranks/" not in str(i.path)]
    items[:] = others + sorted(mine, key=size)
