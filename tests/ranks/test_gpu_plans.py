"""Any plan on the GPUs of ranks, over the stand-in driver: agreement, random plans, signals, what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dovetail
from dovetail.coll import arguments, gpu
from dovetail.errors import MismatchError, NotSupported, PlanError, Timeout
from dovetail.hw.cpu.executor import PlanRunner
from dovetail.hw.gpu import symmetric, tensors
from dovetail.hw.gpu.call import GpuRunner
from dovetail.hw.gpu.heap import Heap
from dovetail.hw.gpu.world import GpuWorld, world_of
from dovetail.plan import Plan, Role, SignalKind, passes
from dovetail.plan import step as st
from dovetail.plan.build import all_gather, all_to_all
from dovetail.plan.build.assembly import Assembly
from tests.ranks import workers
from tests.ranks.gpuranks import N, Ready, gathered, pair_of, set_up, tensor_of, word
from tests.unit import randomplans

CALLS: dict[str, Callable[[Any], Any]] = {
    "another collective": lambda g: (
        dovetail.all_reduce(tensor_of(8))
        if g.rank == 0
        else dovetail.all_gather_into_tensor(tensor_of(8 * g.size), tensor_of(8))
    ),
    "another size": lambda g: dovetail.all_reduce(tensor_of(8 + g.rank)),
    "another dtype": lambda g: dovetail.all_reduce(tensor_of(8, (torch.float32, torch.int32)[g.rank > 0])),
    "another root": lambda g: dovetail.broadcast(tensor_of(8), int(g.rank > 0)),
    "another variant": lambda g: dovetail.all_reduce(tensor_of(8), variant="oneshot" if g.rank else "twoshot"),
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_disagree(ready: Ready, world: int, what: str) -> None:
    """Every rank gets an error that shows both calls; nothing moved, so the group goes on."""
    call = CALLS[what]

    def job() -> dict[int, str]:
        g = set_up()
        with pytest.raises(MismatchError) as caught:
            call(g)
        workers.all_gather("pcpy", "mixed", 100, torch.float32, 3)
        return caught.value.calls

    for rank, calls in enumerate(ready.run(world, job)):
        assert rank in calls
        assert len(set(calls.values())) == 2, calls


@pytest.mark.parametrize("world", [2])
def test_asynchronous_calls_disagree(ready: Ready, world: int) -> None:
    def job() -> None:
        g = set_up()
        work = dovetail.all_reduce(tensor_of(8 + g.rank), async_op=True)
        with pytest.raises(MismatchError):
            work.wait()
        assert isinstance(work.exception(), MismatchError)
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(MismatchError):
            work.get_future().wait()
        workers.all_gather("pcpy", "mixed", 100, torch.float32, 3)

    ready.run(world, job)


@pytest.mark.parametrize("world", [2, 3])
def test_splits_disagree(ready: Ready, world: int) -> None:
    def job() -> str:
        g = set_up()
        send, receive = [2] * g.size, [2] * g.size
        if g.rank == 1:
            receive[0] = 3  # rank 0 sends 2 rows
        inp, out = tensor_of(4 * sum(send)).view(-1, 4), tensor_of(4 * sum(receive)).view(-1, 4)
        with pytest.raises(MismatchError) as caught:
            dovetail.all_to_all_single(out, inp, receive, send)
        workers.all_gather("pcpy", "mixed", 100, torch.float32, 3)
        return str(caught.value)

    for text in ready.run(world, job):
        assert "32" in text
        assert "48" in text


@pytest.mark.parametrize("world", [3])
def test_random_plans_as_on_the_cpu(ready: Ready, world: int) -> None:
    """60 random plans on GPU memory leave the bytes that the CPU's executor leaves."""

    def job() -> int:
        g = set_up()
        side = gpu.group_of(g, "cuda", 0)
        moved = 0
        for seed in range(60):
            plan = randomplans.random_plan(seed, ranks=3, moves=12, buffer_bytes=500)
            filled = randomplans.contents_of(plan, seed)
            users = [n for n, b in enumerate(plan.buffers) if b.role is not Role.SCRATCH]
            both = []
            for here in (False, True):
                tensors = {}
                for n in users:
                    size = plan.buffers[n].sizes[g.rank]
                    t = side.world.heap.empty((size,), torch.uint8) if here else dovetail.empty(size, dtype=torch.uint8)
                    tensors[plan.buffers[n].name] = t.copy_(torch.from_numpy(filled[g.rank, n]))
                runner: Any = GpuRunner(side, plan, most_streams=1 + seed % 4) if here else PlanRunner(g, plan)
                for _ in range(1 + seed % 2):  # the same bytes come of two runs only if they do not overlap
                    ticket = runner.submit(tensors)
                    ticket.wait(20)
                both.append(tensors)
            for name in both[0]:
                assert torch.equal(both[0][name], both[1][name]), (seed, name)
            moved += sum(ticket.bytes_by_path.values())
        return moved

    assert min(ready.run(world, job)) > 10_000


@pytest.mark.parametrize("world", [2])
def test_imported_signals_gates_and_parameters(ready: Ready, world: int) -> None:
    def released(slabs: int, slab_bytes: int) -> Plan:
        """Rank 0 sends slab k to rank 1 when its caller has raised `flag` to k + 1; the rows of a slab are strided."""
        a = Assembly("released copies", 2)
        size = slabs * slab_bytes
        src = a.buffer("input", Role.INPUT, [size, -2])
        dst = a.buffer("output", Role.OUTPUT, [-2, size])
        flag, done = a.signal("flag", 0, SignalKind.IMPORTED), a.signal("done", 1)
        at = np.arange(slabs, dtype=np.int64) * slab_bytes
        copies = st.copy2d((0, src, at), (1, dst, at), 16, slab_bytes // 16, 16, 16)
        waits = st.wait(np.full(slabs, flag), np.arange(1, slabs + 1))
        a.queue(0, 0, st.stamp(0), st.interleave(waits, copies), st.signal(done), st.stamp(1))
        a.queue(1, 0, st.wait(done))
        a.goal(st.copy((0, src, 0), (1, dst, 0), size))
        return passes.entry(a.plan())

    def job() -> None:
        g = set_up()
        side = gpu.group_of(g, "cuda", 0)
        runner = GpuRunner(side, released(8, 160))
        name = "input" if g.rank == 0 else "output"
        for seed in range(4):
            t = workers.make("symmetric", g.rank, 1280, torch.uint8)
            if g.rank == 0:
                t.copy_(workers.data(seed, 0, 1280, torch.uint8))
            ticket = runner.submit({name: t})
            if g.rank == 0:
                for k in range(8):
                    assert not ticket.is_over()
                    if k % 2:
                        ticket.raise_signal("flag", k + 1)
                    else:
                        address, base = ticket.signal_address("flag")
                        word(address)[0] = base + k + 1
            ticket.wait(20)
            if g.rank == 1:
                assert torch.equal(t, workers.data(seed, 0, 1280, torch.uint8))
        if g.rank == 0:
            first, last = ticket.stamps_us()
            assert first == 0.0 < last
            for call in (lambda: ticket.raise_signal("flog"), lambda: ticket.signal_address("flog"), ticket.gate):
                with pytest.raises(PlanError, match="imports no signal|has no signal|has no gate"):
                    call()
        gated = GpuRunner(side, passes.prelaunch(passes.entry(all_gather.bcst(g.size, 4 * N))))
        out, inp = pair_of(7, g)
        ticket = gated.submit({"input": inp, "output": out}, gated=True)
        time.sleep(0.01)
        assert torch.isnan(out).all()
        ticket.fire()
        ticket.wait(20)
        assert torch.equal(out, gathered(7, g.size))
        gated.submit({"input": inp, "output": workers.poison(out)}).wait(20)  # not armed: the gate is open
        assert torch.equal(out, gathered(7, g.size))
        uneven = GpuRunner(side, passes.entry(all_to_all.pcpy_uneven(g.size)))
        table = np.array([[4 * (1 + (i + j) % 3) for j in range(g.size)] for i in range(g.size)])
        send, receive = table[g.rank], table[:, g.rank]
        params = [*(np.cumsum(send) - send), *send, *(np.cumsum(receive) - receive), *receive]
        inp = workers.make("symmetric", g.rank, int(send.sum()), torch.uint8).fill_(g.rank)
        out = workers.make("symmetric", g.rank, int(receive.sum()), torch.uint8)
        uneven.submit({"input": inp, "output": out}, [int(p) for p in params]).wait(20)
        assert out.tolist() == [r for r in range(g.size) for _ in range(int(receive[r]))]

    ready.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_plans_that_are_refused(ready: Ready, world: int) -> None:
    def job() -> None:
        g = set_up()
        side = gpu.group_of(g, "cuda", 0)
        with pytest.raises(NotSupported, match="is for 3 ranks"):
            GpuRunner(side, passes.entry(all_gather.pcpy(3, 8)))
        runner = GpuRunner(side, passes.entry(all_gather.pcpy(2, 8)))
        with pytest.raises(ValueError, match="wrong or missing: \\['output'\\]"):
            runner.submit({"input": tensor_of(2)})
        many = Assembly("many signals", 2)
        many.buffer("input", Role.INPUT, 8)
        for n in range(520):
            many.signal(f"s{n}", 0)
        many.queue(0, 0, st.signal(np.arange(520)))
        with pytest.raises(NotSupported, match="signals on one rank; at most 511 fit"):
            GpuRunner(side, passes.entry(many.plan()))
        good = passes.entry(all_gather.pcpy(2, 8))
        first = good.queues[0]
        wrong = good.replace(queues=(replace(first, steps=first.steps[:-1]), *good.queues[1:]))
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("DOVETAIL_CHECK", raising=False)
            GpuRunner(side, wrong, check=False)
            with pytest.raises(PlanError, match="race"):
                GpuRunner(side, wrong)
        # Ranks that run different plans see it before anything moves.
        other = GpuRunner(side, passes.entry(all_gather.pcpy(2, 8 * (1 + g.rank))))
        with pytest.raises(MismatchError, match="fingerprint"):
            other.submit({"input": tensor_of(8), "output": tensor_of(16)})
        workers.all_gather("pcpy", "mixed", 100, torch.float32, 3)

    ready.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_host_heap(ready: Ready, world: int) -> None:
    """Pinned memory in the ranks' arenas: peers' copies go to and from host memory."""

    def job() -> dict[str, int]:
        g = set_up()
        side = gpu.group_of(g, "cuda", 0)
        runner = GpuRunner(side, passes.entry(all_gather.pcpy(2, 4 * N)))
        for seed in range(3):
            inp = side.world.heap.empty((N,), torch.float32).copy_(workers.data(seed, g.rank, N, torch.float32))
            out = workers.poison(side.world.host_heap.empty((N * g.size,), torch.float32))
            ticket = runner.submit({"input": inp, "output": out})
            ticket.wait(20)
            assert torch.equal(out, gathered(seed, g.size))
        return ticket.bytes_by_path

    for paths in ready.run(world, job):
        assert set(paths) == {"d2h"}


@pytest.mark.parametrize("world", [2])
def test_the_edges_of_a_rank(ready: Ready, world: int) -> None:
    """Another GPU, a capturing stream, a driver without IPC, memory in a peer's arena, a work that is not issued."""

    def job() -> None:
        g = set_up()
        side = gpu.group_of(g, "cuda", 0)
        with pytest.raises(ValueError, match="this rank uses GPU 0, the tensor is on GPU 1: one GPU per rank"):
            world_of(g.world, "cuda", 1)
        device = side.world.device
        for caps, local, text in (
            (replace(device.caps, ipc=False), True, "no IPC"),
            (device.caps, False, "spans hosts"),
        ):
            with pytest.raises(NotSupported, match=text):
                GpuWorld(SimpleNamespace(local=local, size=2), SimpleNamespace(caps=caps, name="poor"))  # type: ignore[arg-type]
        out, inp = pair_of(4, g)
        tensors.is_capturing, asked = lambda _: True, tensors.is_capturing
        try:
            with pytest.raises(NotSupported, match="current stream is capturing a graph"):
                dovetail.all_gather_into_tensor(out, inp, variant="pcpy")
        finally:
            tensors.is_capturing = asked
        dovetail.barrier()
        if g.rank == 1:
            time.sleep(0.1)  # the other's call is seen not to be issued
        work = dovetail.all_gather_into_tensor(out, inp, variant="pcpy", async_op=True)
        if g.rank == 0:
            assert not work.is_completed()
            assert work.exception() is None
            assert work.ticket.variant == "pcpy"
            with pytest.raises(Timeout, match="was not issued after 0.01 s; it goes on"):
                work.wait(0.01)
        work.synchronize()
        assert torch.equal(out, gathered(4, g.size))
        runner = GpuRunner(side, passes.entry(all_gather.pull(2, 4 * N)))
        inp = side.world.host_heap.empty((N,), torch.float32).copy_(workers.data(5, g.rank, N, torch.float32))
        runner.submit({"input": inp, "output": workers.poison(out)}).wait(20)  # read from the peer's arena
        assert torch.equal(out, gathered(5, g.size))
        assert dovetail.stats()

    ready.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_tensors_of_torchs_symmetric_memory(ready: Ready, world: int) -> None:
    """Memory that somebody else has mapped on every rank is used where it is; on one rank only it is refused."""

    def job() -> None:
        g = set_up()
        side = gpu.group_of(g, "cuda", 0)
        driver = side.world.device.driver
        theirs = Heap(side.world.device)  # torch's heap, as it were
        mine = [theirs.empty((n,), torch.float32) for n in (N, N * g.size)]
        handles = torch.empty(64 * g.size, dtype=torch.uint8)
        place = torch.frombuffer(bytearray(theirs.segments[0].handle), dtype=torch.uint8)
        arguments.one_device, counted = lambda _: ("cpu", -1), arguments.one_device
        dovetail.all_gather_into_tensor(handles, place)
        arguments.one_device = counted
        opened = [driver.ipc_open(bytes(handles[64 * r : 64 * r + 64].tolist())) for r in range(g.size) if r != g.rank]
        opened.insert(g.rank, theirs.segments[0].base)
        offsets = {t.data_ptr(): t.data_ptr() - theirs.segments[0].base for t in mine}

        def pointers(tensor: torch.Tensor, _: Any) -> tuple[int, ...] | None:
            offset = offsets.get(tensor.data_ptr())
            return None if offset is None else tuple(base + offset for base in opened)

        symmetric.pointers_of, asked = pointers, symmetric.pointers_of
        before = g.baseline
        g.baseline = object()
        try:
            for seed in range(3):
                mine[0].copy_(workers.data(seed, g.rank, N, torch.float32))
                work = dovetail.all_gather_into_tensor(mine[1], mine[0], variant="pcpy", async_op=True)
                work.synchronize()
                assert torch.equal(mine[1], gathered(seed, g.size))
                assert work.ticket.variant == "pcpy"  # not staged
            one = mine[0] if g.rank == 0 else side.world.heap.empty((N,), torch.float32)
            with pytest.raises(MismatchError, match=r"ranks \[0\] pass tensors of torch's symmetric memory"):
                dovetail.all_gather_into_tensor(mine[1], one, variant="pcpy")
        finally:
            symmetric.pointers_of, g.baseline = asked, before
        out, inp = pair_of(9, g)
        dovetail.all_gather_into_tensor(out, inp, variant="pcpy")
        side.settle()
        assert torch.equal(out, gathered(9, g.size))  # the group goes on

    ready.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_a_gpu_tensor_here_and_a_cpu_tensor_there(ready: Ready, world: int) -> None:
    """The first call with GPU tensors finds out, and the group goes on."""

    def job() -> None:
        g = set_up()
        pair = g.world.new_group([0, 1])
        counted = arguments.one_device
        if g.rank == 1:
            arguments.one_device = lambda _: ("cpu", -1)
        try:
            with pytest.raises(MismatchError, match="do not make the same call"):
                dovetail.all_reduce(torch.ones(4), group=pair, variant="oneshot")
        finally:
            arguments.one_device = counted
        workers.all_reduce("oneshot", "symmetric", 100, torch.float32, "sum", 1, pair)
        pair.close()

    ready.run(world, job)
