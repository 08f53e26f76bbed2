"""Transport `store` of GPUs at its edges, under Triton's interpreter: nothing to do, refusals, failures, memory.

A child process starts 2 and then 3 ranks. They call the public operators, which take the calls for some on a GPU. What
one rank refuses or suffers must reach the others, whose timeouts are long: a `Timeout` is a failure here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
from dovetail.errors import DovetailError, HardwareError, MismatchError, NotSupported, PeerError
from tests.interp import fusedlib as lib

EMPTY = {
    f"{op} {'x'.join(map(str, shape))}": (op, shape)
    for op, shapes in {
        "all_gather_matmul": ((0, 5, 8), (5, 0, 8), (3, 5, 0), (3, -1, 8)),  # -1: rank 1 has no columns, others 5
        "matmul_reduce_scatter": ((0, 5, 8), (5, 0, 8), (5, 3, 0)),
        "gemv_all_reduce": ((0, 5, 8), (5, 0, 8), (5, 3, 0)),
        "gemm_all_to_all": ((0, 5, 8), (4, 0, 8), (4, 5, 0)),
    }.items()
    for shape in shapes
}
CASES: dict[str, Callable[[Any], str]] = {}
#: A rank ends in them: they have a world of their own.
DEADLY = ("a dead peer", "a peer that died after its part", "an exception after the exchange")
WORLDS = {"a dead peer": 3, "a peer that died after its part": 3, "an exception after the exchange": 2}
DEAD = {"a dead peer": "1", "a peer that died after its part": "2"}


@pytest.fixture(scope="module")
def outcome(need: Callable[[str, object], None]) -> dict[str, str]:
    need("triton", importlib.util.find_spec("triton"))
    pytest.importorskip("dovetail.hw.cpu._native", reason="the native part is not built")
    return lib.outcomes(__file__)


def _case(work: Callable[[Any], str]) -> Callable[[Any], str]:
    CASES[work.__name__.strip("_").replace("_", " ")] = work
    return work


# --- the ranks --------------------------------------------------------------------------------------------------------


def _store(group: Any) -> Any:
    """The kernels of a group, made by a first call."""
    lib.works(group)
    return lib.only_store(group)


def _empty(group: Any, op: str, m: int, n: int, k: int) -> str:
    world, rank = group.size, group.rank
    if op in ("matmul_reduce_scatter", "gemm_all_to_all"):
        m *= world
    columns = [n if n >= 0 else 5 * (r != 1) for r in range(world)]
    xs = [lib.numbers(r, 1, m, k, dtype=torch.float32) for r in range(world)]
    ws = [lib.numbers(r, 2, columns[r], k, dtype=torch.float32) for r in range(world)]
    if n < 0:
        out = _store(group).all_gather_matmul(xs[rank], ws[rank])
    else:
        out = lib.call(op, group, xs[rank], ws[rank])
    products = [lib.product(x, w) for x, w in zip(xs, ws, strict=True)] if n >= 0 else []
    if op == "all_gather_matmul":
        want = lib.product(torch.cat(xs), ws[rank])
    elif op == "gemm_all_to_all":
        want = torch.cat([p[rank * m // world : (rank + 1) * m // world] for p in products])
    else:
        want = lib.summed(products)
        want = want[rank * m // world : (rank + 1) * m // world] if op == "matmul_reduce_scatter" else want
    return lib.differs(out, want) or lib.works(group)


@contextlib.contextmanager
def _capturing(store: Any) -> Iterator[None]:
    store.is_capturing = lambda: True
    try:
        yield
    finally:
        del store.is_capturing


@_case
def _capture_is_refused_and_the_group_goes_on(group: Any) -> str:
    """By all ranks, or by one, which the others hear of."""
    store, x, w = _store(group), torch.ones(2 * group.size, 8), torch.ones(4, 8)
    found = []
    for op, args in (
        ("gemm_all_to_all", (x, w)),
        ("gemv_all_reduce", (x[:2], w)),
        ("all_gather_matmul", (x, w)),
        ("matmul_reduce_scatter", (x, w)),
        ("embedding_all_to_all", ([torch.ones(4, 4)], torch.zeros(group.size, dtype=torch.int64),
                                  torch.arange(group.size + 1))),
    ):  # fmt: skip
        with _capturing(store):
            found.append(lib.raises(NotSupported, "captured", lambda op=op, args=args: lib.call(op, group, *args)))
        wanted = (NotSupported, "captured") if group.rank == 0 else (MismatchError, "NotSupported")
        with _capturing(store) if group.rank == 0 else contextlib.nullcontext():
            found.append(lib.raises(*wanted, lambda op=op, args=args: lib.call(op, group, *args)))
        found.append(lib.works(group))
    with _capturing(store):
        found.append(lib.works(group))  # this shape ran before
    with _capturing(store) if group.rank == 0 else contextlib.nullcontext():
        found.append(lib.raises(MismatchError, "captured", lambda: lib.works(group)))
    return "; ".join(filter(None, [*found, lib.works(group)]))


@_case
def _a_table_out_of_line_is_refused_and_the_group_goes_on(group: Any) -> str:
    table = torch.ones(5, 2)[1:] if group.rank == 0 else torch.ones(4, 2)  # 8 bytes into its memory
    values, offsets = torch.zeros(2 * group.size, dtype=torch.int64), torch.arange(2 * group.size + 1)
    wanted = (ValueError, "multiple of 16") if group.rank == 0 else (MismatchError, "multiple of 16")
    wrong = lib.raises(*wanted, lambda: lib.call("embedding_all_to_all", group, [table], values, offsets))
    return wrong or lib.works(group)


@_case
def _no_memory_on_one_rank_is_told_to_those_in_the_exchange(group: Any) -> str:
    store = _store(group)
    if group.rank == 0:

        def full(*args: Any) -> Any:
            time.sleep(0.2)
            raise HardwareError("no memory is left")

        store._addresses.exchange = full
    wanted = (HardwareError, "no memory") if group.rank == 0 else (PeerError, "failed on rank 0")
    return lib.raises(*wanted, lambda: lib.works(group, n=100))  # more than the stage has room for


@_case
def _ranks_with_unequal_shares_of_their_gpus_cut_alike(group: Any) -> str:
    """Rank 0 has 2 multiprocessors, others thousands: tiles of their own choice would differ."""
    from dovetail.ops.gpu.store import Store

    class Uneven(Store):
        def _num_cores(self) -> int:
            return 2 * self.group.size if self.group.rank == 0 else 4096 * self.group.size

    lib.works(group)
    group.ops.known["store", torch.device("cpu")] = store = Uneven(group, "cpu")
    store._blocks = None
    many = [lib.numbers(r, 3, 520, 16, dtype=torch.float16) for r in range(group.size)]
    w = [lib.numbers(r, 4, 300, 16, dtype=torch.float16) for r in range(group.size)]
    rows = 520 // group.size
    out = store.matmul_reduce_scatter(many[group.rank][: rows * group.size], w[group.rank])
    parts = [lib.product(x, y)[rows * group.rank :][:rows] for x, y in zip(many, w, strict=True)]
    return lib.differs(out, lib.summed(parts)) or lib.works(group, n=70)


@_case
def _check_raises_for_a_row_out_of_range_once(group: Any) -> str:
    from dovetail import ops

    _store(group)
    values, offsets = torch.zeros(group.size, dtype=torch.int64), torch.arange(group.size + 1)
    real, calls_check = values.clone(), []
    values[0] = 10**12 if group.rank == 1 else 0
    from dovetail.ops import calls

    in_range, calls._in_range = calls._in_range, lambda call: None
    try:
        lib.call("embedding_all_to_all", group, [torch.ones(4, 4)], values, offsets)
    finally:
        calls._in_range = in_range
    for _ in range(2):
        try:
            ops.check(group, synchronize=True)
            calls_check.append("nothing")
        except IndexError as error:
            calls_check.append(str(error)[:9])
    wanted = ["values[0]", "nothing"] if group.rank == 1 else ["nothing", "nothing"]
    if calls_check != wanted:
        return f"{calls_check}"
    out = lib.call("embedding_all_to_all", group, [torch.ones(4, 4)], real, offsets)
    return lib.differs(out, torch.ones(1, group.size, 4))


@_case
def _memory_does_not_grow_with_every_shape(group: Any) -> str:
    """One stage per operator and dtype serves all shapes, larger and smaller ones; results stay right on it."""
    from dovetail.ops.gpu import shared, tables

    real = shared._MOST_ROWS, tables._MOST_TABLES
    shared._MOST_ROWS, tables._MOST_TABLES = 3, 4
    try:
        store = _store(group)
        kept = []
        for run, size in enumerate((2, 7, 3, 12, 2, 9, 5, 12, 1, 6)):
            for state in store._states.values():
                if state.stage is not None:
                    store._addresses.barrier()
                    state.stage.tensor.fill_(float("nan"))
                    store._addresses.barrier()
            lib.nap(group.rank, run)
            found = lib.works(group, m=size, n=6 * size, run=run)
            x = [lib.numbers(r, run, size * group.size, 8, dtype=torch.float32) for r in range(group.size)]
            w = [lib.numbers(r, 50 + run, 3 * size, 8, dtype=torch.float32) for r in range(group.size)]
            mine = slice(group.rank * size, (group.rank + 1) * size)
            out = lib.call("matmul_reduce_scatter", group, x[group.rank], w[group.rank])
            parts = [lib.product(a, b)[mine] for a, b in zip(x, w, strict=True)]
            found = found or lib.differs(out, lib.summed(parts))
            if store._states["matmul_reduce_scatter", torch.float32].sizes[1] < 3 * size * size * group.size:
                return "the stage did not grow"
            out = lib.call("all_gather_matmul", group, x[group.rank], w[group.rank])
            found = found or lib.differs(out, lib.product(torch.cat(x), w[group.rank]))
            if found:
                return f"size {size}: {found}"
            kept.append(out)
        sizes = {
            "states": (len(store._states), 3),
            "tables of tiles": (len(store._rows), 3),
            "counters": (len(store._counters), 3),
            "inputs": (len(store._inputs), 1),
            "tables": (len(store._tables._found), 4),
        }
        return ", ".join(f"{n} {name}" for name, (n, most) in sizes.items() if n > most)
    finally:
        shared._MOST_ROWS, tables._MOST_TABLES = real


@_case
def _ranks_meet_once_in_a_call(group: Any) -> str:
    """Once memory is known; also where the numbers of tables change, results are right."""
    from dovetail.hw.meeting import Meeting

    meetings = []
    meet = Meeting._run

    def counted(self: Any, *args: Any) -> Any:
        if self is not group.ops._meeting:  # which counts for itself, also what native code does
            meetings.append(self)
        return meet(self, *args)

    def pooled(tables: int, run: int) -> str:
        batch, counts = 2 * group.size, [tables if r == 1 else 2 for r in range(group.size)]
        wants = []
        for r in range(group.size):
            weights = [lib.numbers(r, run + t, 7, 8, dtype=torch.float32) for t in range(counts[r])]
            values, offsets = lib.bags(r, run, counts[r], batch, [7] * counts[r], 4)
            wants.append(lib.pooled(weights, values, offsets, batch, "sum"))
            if r == group.rank:
                mine = weights, values, offsets
        out = lib.call("embedding_all_to_all", group, *mine)
        return lib.differs(out, torch.cat(wants, dim=1)[2 * group.rank :][:2])

    def products(op: str) -> str:
        return _empty(group, op, 3 if op != "gemm_all_to_all" else 4, 5, 8)

    work: list[tuple[str, Callable[[], str], int]] = [
        (op, lambda op=op: products(op), 2)  # type: ignore[misc]
        for op in ("all_gather_matmul", "gemv_all_reduce", "gemm_all_to_all", "matmul_reduce_scatter")
    ]
    work.append(("embedding_all_to_all", lambda: pooled(2, 3), 1))
    for _, call, _ in work:
        if wrong := call():
            return wrong
    Meeting._run = counted  # type: ignore[method-assign]
    try:
        for name, call, wanted in work:  # the products make a sum besides
            meetings.clear()
            before = group.ops.meetings
            wrong = call()
            if wrong or (many := len(meetings) + group.ops.meetings - before) != wanted:
                return f"{name}: {wrong or f'{many} meetings'}"
    finally:
        Meeting._run = meet  # type: ignore[method-assign]
    return "; ".join(filter(None, (pooled(tables, run) for run, tables in enumerate((1, 3, 3, 2)))))


@_case
def _a_group_ends_its_kernels(group: Any) -> str:
    store = _store(group)
    group.ops.barrier()
    group.close()
    return "is still there" if store._states or store.launcher.held or store._rows else ""


def _dead_peer(group: Any) -> str:
    """Rank 1 dies when it should launch; its peers, who wait for it in a kernel, hear of it. Their bound is long."""
    store = _store(group)
    if group.rank == 1:
        store._launch = lambda *args, **more: os._exit(3)
    wrong = lib.raises(PeerError, "", lambda: lib.works(group))
    return wrong or lib.raises(DovetailError, "", lambda: lib.works(group))


def _died_after_its_part(group: Any) -> str:
    """Rank 1 stores rank 2's rows and then takes its time; rank 2, which has all it wants, ends meanwhile. Rank 0 still
    waits for rank 1, and gets everything."""
    world, rank = group.size, group.rank
    _store(group)
    xs = [lib.numbers(r, 1, world * 2, 8, dtype=torch.float32) for r in range(world)]
    ws = [lib.numbers(r, 2, 4, 8, dtype=torch.float32) for r in range(world)]

    def replace(what: int, wait: Callable[[], Any]) -> Any:
        replace.entries += what == 0  # type: ignore[attr-defined]
        if rank == 1 and what == 0 and replace.entries == 2:  # type: ignore[attr-defined]
            deadline = time.monotonic() + 60
            while not group.world.native.peer_dead(2) and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(4)  # so that others see it, and look again
        return wait()

    replace.entries = 0  # type: ignore[attr-defined]
    with lib.expecting(replace):
        out = lib.call("gemm_all_to_all", group, xs[rank], ws[rank])
    if rank == 2:
        os._exit(3)
    want = torch.cat([lib.product(x, w)[2 * rank : 2 * rank + 2] for x, w in zip(xs, ws, strict=True)])
    return lib.differs(out, want)


def _exception_after_the_exchange(group: Any) -> str:
    """Rank 1 fails when it should launch; rank 0, in its kernel, hears of it."""
    store = _store(group)
    if group.rank == 1:

        def launch(*args: Any, **more: Any) -> None:
            time.sleep(0.5)
            raise RuntimeError("no kernel")

        store._launch = launch
    text = "no kernel" if group.rank == 1 else "rank 1"
    wrong = lib.raises((PeerError, RuntimeError), text, lambda: lib.works(group))
    return wrong or lib.raises(DovetailError, "", lambda: lib.works(group))


def _all_cases() -> dict[str, str]:
    import dovetail

    lib.wait_politely()
    world, found = range(int(os.environ["DOVETAIL_WORLD_SIZE"])), {}
    with lib.as_on_a_gpu():
        group = lib.new_group(dovetail, world)
        for name, (op, shape) in EMPTY.items():
            found[name] = lib.guarded(lambda op=op, shape=shape: _empty(group, op, *shape))
        for name, work in CASES.items():
            found[name] = lib.guarded(lambda work=work: work(lib.new_group(dovetail, world)))
    return found


def _deadly(name: str, folder: str, environment: dict[str, str]) -> None:
    """A rank; one that lives writes what it found."""
    os.environ.update(environment)
    import dovetail

    dovetail.init()
    lib.wait_politely()
    work = dict(zip(DEADLY, (_dead_peer, _died_after_its_part, _exception_after_the_exchange), strict=True))[name]
    with lib.as_on_a_gpu():
        group = lib.new_group(dovetail, range(int(os.environ["DOVETAIL_WORLD_SIZE"])))
        found = lib.guarded(lambda: work(group))
        (Path(folder) / str(group.rank)).write_text(found or "right")
        deadline = time.monotonic() + 30
        while len(os.listdir(folder)) < group.size - (name in DEAD) and time.monotonic() < deadline:
            time.sleep(0.05)  # who ends is dead: others must hear of it in another way


def _main() -> None:
    import dovetail
    import dovetail.language

    found: dict[str, str] = {}
    for world in (2, 3):
        for number, cases in enumerate(dovetail.launch(_all_cases, world, timeout=180)):
            for name, wrong in cases.items():
                found[name] = found.get(name, "") or (wrong and f"rank {number} of {world}: {wrong}")
    for name, world in WORLDS.items():
        with tempfile.TemporaryDirectory() as folder:
            context, token = multiprocessing.get_context("spawn"), uuid.uuid4().hex
            ranks = [
                context.Process(
                    target=_deadly,
                    args=(name, folder, {
                        "DOVETAIL_RENDEZVOUS": token, "DOVETAIL_RANK": str(r), "DOVETAIL_WORLD_SIZE": str(world)
                    }),
                    daemon=True,
                )
                for r in range(world)
            ]  # fmt: skip
            for rank in ranks:
                rank.start()  # not by `launch`, which ends the others when one dies
            for rank in ranks:
                rank.join(60)
            said = {path.name: path.read_text() for path in Path(folder).iterdir()}
        missing = {str(r) for r in range(world)} - set(said) - {DEAD.get(name)}
        wrong = {number: text for number, text in said.items() if text != "right"}
        found[name] = f"{wrong} {sorted(missing)} said nothing" if wrong or missing else ""
    print(json.dumps(found))


@pytest.mark.parametrize("case", [*EMPTY, *CASES, *DEADLY])
def test_ranks(outcome: dict[str, str], case: str) -> None:
    assert outcome[case] == ""


def test_ranks_of_one_gpu_share_it_equally() -> None:
    pytest.importorskip("triton")
    from dovetail.ops.gpu.part import shares

    assert shares([b"a", b"a", b"b"], [132, 132, 132], [0, 0, 0]) == [66, 66, 132]
    assert shares([b"a", b"b"], [132, 80], [16, 0]) == [16, 80]
    with pytest.raises(NotSupported, match="1 to 66"):
        shares([b"a", b"a"], [132, 132], [0, 67])


def test_kernels_are_watched_as_long_as_they_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.ops.gpu import status as module

    monkeypatch.setattr(module, "_LINGER_S", 0.0)
    runs: list[Any] = []
    peers = SimpleNamespace(peer_dead=lambda rank: rank == 7)
    group = SimpleNamespace(
        rank=0, ranks=(5, 6, 7), broken=None, native=SimpleNamespace(abort=0), world=SimpleNamespace(native=peers)
    )
    watchdog = SimpleNamespace(add=runs.append)
    status = module.Status(group, SimpleNamespace(device=torch.device("cpu"), watchdog=watchdog))  # type: ignore[arg-type]
    event = SimpleNamespace(query=lambda: event.is_over, is_over=False)
    status.begun(event)
    status.begun(event)
    assert len(runs) == 1
    assert not runs[0].is_over()
    runs[0].look()
    assert int(status.words[module.STOP]) == 1 << 2  # rank 2 of the group is dead
    group.native.abort = 1
    runs[0].look()
    assert int(status.words[module.STOP]) == -1
    event.is_over = True
    assert runs[0].is_over()
    status.begun(captured=True)
    assert len(runs) == 2
    assert not runs[1].is_over()
    status.close()
    assert runs[1].is_over()


if __name__ == "__main__":
    _main()
