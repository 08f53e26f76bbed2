"""Any plan on the software engines: hand-made steps, imported signals, gates, parameters, stamps, bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dovetail
from dovetail.errors import MismatchError, NotSupported, PlanError
from dovetail.hw.cpu.executor import PlanRunner
from dovetail.plan import Plan, Role, SignalKind, Space, passes
from dovetail.plan import step as st
from dovetail.plan.build import all_gather, all_to_all
from dovetail.plan.build.assembly import Assembly
from tests.ranks import workers


def released_copies(slabs: int, slab_bytes: int) -> Plan:
    """Rank 0 sends slab k to rank 1 when its caller has raised `flag` to k + 1; the rows of a slab are strided."""
    a = Assembly("released copies", 2)
    size = slabs * slab_bytes
    src = a.buffer("input", Role.INPUT, [size, -2])
    dst = a.buffer("output", Role.OUTPUT, [-2, size])
    flag = a.signal("flag", 0, SignalKind.IMPORTED)
    done = a.signal("done", 1)
    at = np.arange(slabs, dtype=np.int64) * slab_bytes
    rows = slab_bytes // 16
    copies = st.copy2d((0, src, at), (1, dst, at), 16, rows, 16, 16)
    a.queue(0, 0, st.interleave(st.wait(np.full(slabs, flag), np.arange(1, slabs + 1)), copies), st.signal(done))
    a.queue(1, 0, st.wait(done))
    a.goal(st.copy((0, src, 0), (1, dst, 0), size))
    return passes.entry(a.plan())


@pytest.mark.parametrize("world", [2])
def test_imported_signals(pools: Any, world: int) -> None:
    def job() -> None:
        g = workers.world()
        plan = released_copies(8, 160)
        runner = PlanRunner(g, plan)
        name = "input" if g.rank == 0 else "output"
        for seed in range(6):
            t = workers.make("symmetric", g.rank, 1280, torch.uint8)
            if g.rank == 0:
                t.copy_(workers.data(seed, 0, 1280, torch.uint8))
            ticket = runner.submit({name: t})
            if g.rank == 0:
                for k in range(8):
                    assert not ticket.is_over()
                    ticket.raise_signal("flag", k + 1)
            ticket.wait(20)
            if g.rank == 1:
                assert workers.same(t, workers.data(seed, 0, 1280, torch.uint8))
        if g.rank == 0:
            with pytest.raises(PlanError, match="imports no signal"):
                ticket.raise_signal("flog")
        dovetail.barrier()

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2, 3])
def test_gate_and_parameters(pools: Any, world: int) -> None:
    def job() -> None:
        g = workers.world()
        gated = PlanRunner(g, passes.prelaunch(passes.entry(all_gather.bcst(g.size, 400))))
        inp = workers.make("symmetric", g.rank, 100, torch.float32)
        out = workers.make("symmetric", g.rank, 100 * g.size, torch.float32)
        ticket = gated.submit({"input": inp, "output": out}, gated=True)
        inp.copy_(workers.data(3, g.rank, 100, torch.float32))
        assert not ticket.is_over()
        ticket.fire()
        ticket.wait(20)
        assert workers.same(out, torch.cat([workers.data(3, r, 100, torch.float32) for r in range(g.size)]))
        uneven = PlanRunner(g, passes.entry(all_to_all.pcpy_uneven(g.size)))
        lengths = [4 * (1 + (i + j) % 3) for i in range(g.size) for j in range(g.size)]
        table = np.array(lengths).reshape(g.size, g.size)
        send, receive = table[g.rank], table[:, g.rank]
        params = [*(np.cumsum(send) - send), *send, *(np.cumsum(receive) - receive), *receive]
        inp = workers.make("symmetric", g.rank, int(send.sum()), torch.uint8).fill_(g.rank)
        out = workers.make("symmetric", g.rank, int(receive.sum()), torch.uint8)
        uneven.submit({"input": inp, "output": out}, [int(p) for p in params]).wait(20)
        assert out.tolist() == [r for r in range(g.size) for _ in range(int(receive[r]))]

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [3])
def test_runners_that_live_for_one_run(pools: Any, world: int) -> None:
    """The engine drops the last reference to a runner's call while the caller goes on to the next: neither waits."""

    def job() -> None:
        g = workers.world()
        inp, out = dovetail.empty(32), dovetail.empty(32 * g.size)
        for seed in range(150):
            inp.copy_(workers.data(seed, g.rank, 32, torch.float32))
            PlanRunner(g, passes.entry(all_gather.pcpy(g.size, 128))).submit({"input": inp, "output": out}).wait(20)
            assert workers.same(out, torch.cat([workers.data(seed, r, 32, torch.float32) for r in range(g.size)]))
            dovetail.barrier()

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2])
def test_refused(pools: Any, world: int) -> None:
    def job() -> None:
        g = workers.world()
        with pytest.raises(PlanError, match="no entry handshake"):
            PlanRunner(g, all_gather.pcpy(2, 8))
        with pytest.raises(PlanError, match="is for 3 ranks"):
            PlanRunner(g, passes.entry(all_gather.pcpy(3, 8)))
        with pytest.raises(NotSupported, match="fixed signal values"):
            PlanRunner(g, passes.entry(all_gather.pcpy(2, 8)).replace(captured=True))
        runner = PlanRunner(g, passes.entry(all_gather.pcpy(2, 8)))
        with pytest.raises(ValueError, match="wrong or missing: \\['output'\\]"):
            runner.submit({"input": dovetail.zeros(2)})
        # Ranks that run different plans see it before anything moves.
        other = PlanRunner(g, passes.entry(all_gather.pcpy(2, 8 * (1 + g.rank))))
        with pytest.raises(MismatchError, match="fingerprint"):
            other.submit({"input": dovetail.zeros(8), "output": dovetail.zeros(16)}).wait(20)
        dovetail.barrier()

    pools.get(world).run(job)


def racing(world: int) -> Plan:
    """Ranks send to the next one, and the last one does not wait: it would return before its output is there."""
    a = Assembly("racing", world)
    inp, out = a.buffer("input", Role.INPUT, 64), a.buffer("output", Role.OUTPUT, 64)
    done = [a.signal(f"done {r}", r) for r in range(world)]
    for r in range(world):
        right = (r + 1) % world
        copy = st.copy((r, inp, 0), (right, out, 0), 64)
        a.goal(copy)
        a.queue(r, 0, copy, st.signal(done[right]), *([st.wait(done[r])] if right else []))
    return passes.entry(a.plan())


@pytest.mark.parametrize("world", [2])
def test_a_wrong_plan_is_refused_on_every_rank(pools: Any, world: int) -> None:
    """Before anything is posted: the group goes on. Without a proof it is taken as it is."""

    def job(forced: str) -> str:
        g = workers.world()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOVETAIL_CHECK", forced)
            PlanRunner(g, racing(g.size), check=False) if forced != "1" else None
            try:
                PlanRunner(g, racing(g.size), check=forced != "1")
                found = "taken"
            except PlanError as error:
                found = str(error)
            PlanRunner(g, passes.entry(all_gather.pcpy(2, 400)))
        workers.all_gather("pcpy", "mixed", 100, torch.float32, 3)
        return found

    pool = pools.get(world)
    for forced in ("", "1"):
        for text in pool.run(job, forced):
            assert "race: rank 0 queue 0 step" in text
            assert "writes rank 1 buffer output bytes [0, 64)" in text
    assert pool.run(job, "0") == ["taken"] * world


@pytest.mark.parametrize("world", [2])
def test_bounds(spare_pool: Any, world: int) -> None:
    """A tensor smaller than its buffer, or one that peers can't reach, is refused on every rank before any copy."""

    def job(what: str) -> tuple[str, bool]:
        w = workers.world().world
        g = w.new_group(range(w.size))  # the error breaks it
        runner = PlanRunner(g, passes.entry(all_gather.pcpy(2, 400)))
        inp, out = dovetail.empty(100).fill_(1), dovetail.zeros(200)
        if g.rank == 1:
            inp = inp[:50] if what == "input" else inp
            out = {"output": out[:150], "ordinary": torch.zeros(200)}.get(what, out)
        with pytest.raises(dovetail.errors.DovetailError) as caught:
            runner.submit({"input": inp, "output": out}).wait(20)
        return str(caught.value), not out.any()

    texts = {
        "input": "'input' of rank 1 has 200 bytes, the plan takes 400",
        "output": "'output' of rank 1 has 600 bytes, the plan takes 800",
        "ordinary": "'output' of rank 1 is not symmetric, and peers reach it: use dovetail.empty",
    }
    pool = spare_pool(world)
    for what, expected in texts.items():
        said = pool.run(job, what)
        assert all(expected in text or "the group failed on rank" in text for text, _ in said), said
        assert any(expected in text for text, _ in said), said
        assert all(untouched for _, untouched in said)


def test_step_outside_its_buffer_is_refused_when_compiled() -> None:
    a = Assembly("too far", 1)
    src = a.buffer("input", Role.INPUT, 64, Space.LOCAL)
    dst = a.buffer("output", Role.OUTPUT, 64, Space.LOCAL)
    a.queue(0, 0, st.copy((0, src, 8), (0, dst, 0), 64))
    from dovetail.hw.cpu.program import compile_plan

    with pytest.raises(PlanError, match="step 0: source lies outside its buffer"):
        compile_plan(passes.entry(a.plan()), 0)
