"""A plan of each kind that later features need, by hand: proved as it is, rejected when it is broken.

Every twin is broken by one change. A machine that runs plans under random schedules (`planlib`) is asked for a second
opinion: it never finds a fault in a plan that the checker accepts.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as hs

from dovetail.errors import PlanError
from dovetail.plan import (
    ABSENT,
    AT_RUN,
    DType,
    External,
    Op,
    Param,
    Partition,
    Plan,
    ReduceOp,
    Region,
    Role,
    Signal,
    SignalKind,
)
from dovetail.plan import step as st
from dovetail.plan.check import check
from dovetail.plan.step import UNBOUNDED

from .planlib import HEAP, LOCAL, buffer, changed, faults, find, queue, rejection, signals, swapped, with_steps, without

ENTRY, IMPORTED, EXPORTED = SignalKind.ENTRY, SignalKind.IMPORTED, SignalKind.EXPORTED


def uneven(world: int = 3) -> Plan:
    """All-to-all whose splits are posted at entry; rank i pushes piece j of its input to piece i of rank j."""
    params, partitions, names = [], [], ("send", "receive")
    sends, receives = [], []
    for r in range(world):
        for b, into in enumerate((sends, receives)):
            offsets, lengths = ([len(params) + k * world + p for p in range(world)] for k in (0, 1))
            params += [Param(name=f"{names[b]} offset {r}.{p}", rank=r) for p in range(world)]
            params += [Param(name=f"{names[b]} {r}.{p}", rank=r) for p in range(world)]
            partitions.append(Partition(rank=r, buffer=b, offsets=tuple(offsets), lengths=tuple(lengths)))
            into.append((offsets, lengths))

    def piece(i: int, j: int) -> st.Rows:
        src, dst = (i, 0, 0, sends[i][0][j]), (j, 1, 0, receives[j][0][i])
        return st.copy(src, dst, UNBOUNDED, length_param=sends[i][1][j])

    done = {(i, j): world + n for n, (i, j) in enumerate(_pairs(world))}
    queues = []
    for i in range(world):
        for n, j in enumerate(p for p in range(world) if p != i):
            opening = [st.signal(i)] if n == 0 else []
            own = [piece(i, i)] if n == 0 else []
            closing = [st.signal(done[i, j]), *own, st.wait(done[j, i])]
            queues.append(queue(i, *opening, st.wait(j), piece(i, j), *closing, name=f"to {j}"))
    return Plan(
        name="uneven",
        world=world,
        buffers=(buffer("input", Role.INPUT, [AT_RUN] * world), buffer("output", Role.OUTPUT, [AT_RUN] * world)),
        signals=tuple(Signal(name=f"entry {r}", rank=r, kind=ENTRY) for r in range(world))
        + tuple(Signal(name=f"done {i}.{j}", rank=j) for i, j in done),
        queues=tuple(queues),
        goal=st.sequence(*(piece(i, j) for i in range(world) for j in range(world))),
        params=tuple(params),
        partitions=tuple(partitions),
        equal=tuple((sends[i][1][j], receives[j][1][i]) for i in range(world) for j in range(world)),
    )


def _pairs(world: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(world) for j in range(world) if i != j]


CHUNK, COUNT, SLOTS = 16, 4, 2


def mixed() -> Plan:
    """All-gather by pulling; rank 0's tensors are ordinary and go through a ring, rank 1's are read in place."""
    total = CHUNK * COUNT
    numbers = np.arange(1, COUNT + 1)
    at, ring = (numbers - 1) * CHUNK, (numbers - 1) % SLOTS * CHUNK
    # signals: 0, 1 ready of rank 0, 1; 2 freed of rank 0's ring (by 1), 3 of rank 1's tensor (by 0)

    def drain(reader: int, owner: int) -> st.Rows:
        copies = st.copy((owner, 2, at), (reader, 1, owner * total + at), CHUNK, alt=ring)
        waits, says = st.wait(np.full(COUNT, owner), numbers), st.signal(np.full(COUNT, 2 + owner), numbers)
        return st.interleave(waits, copies, says)

    fills = st.copy((0, 0, at), (0, 2, ring), CHUNK)
    fill = st.interleave(st.wait(np.full(COUNT, 2), numbers - SLOTS), fills, st.signal(np.full(COUNT, 0), numbers))
    fill = fill[(fill["op"] != Op.WAIT) | (fill["value"] > 0)]
    return Plan(
        name="mixed",
        world=2,
        buffers=(
            buffer("input", Role.INPUT, [total] * 2, [LOCAL, HEAP]),
            buffer("output", Role.OUTPUT, [2 * total] * 2, [LOCAL, HEAP]),
            buffer("view", Role.VIEW, [CHUNK * SLOTS] * 2, of=0, staged=(True, False)),
        ),
        signals=signals("ready 0", "ready 1", "freed 0", "freed 1"),
        queues=(
            queue(0, fill, st.wait(2, COUNT), name="stage"),
            queue(0, drain(0, 1), st.copy((0, 0, 0), (0, 1, 0), total), name="pull"),
            queue(1, st.signal(1, COUNT), drain(1, 0), st.copy((1, 0, 0), (1, 1, total), total), name="pull"),
            queue(1, st.wait(3, COUNT), name="end"),
        ),
        goal=st.sequence(*(st.copy((i, 0, 0), (r, 1, i * total), total) for r in (0, 1) for i in (0, 1))),
    )


def reduction(world: int = 8) -> Plan:
    """Rank r sums piece r of eight bf16 inputs in rank order."""
    n = 48
    ranks = np.arange(world)
    queues, goal = [], []
    for r in range(world):
        peers = ranks[ranks != r]
        move = st.reduce((r, 1, 0), n, r * world, world, DType.BFLOAT16, ReduceOp.SUM)
        queues.append(queue(r, st.signal(r), st.wait(peers), move, st.signal(world + r), st.wait(world + peers)))
        goal.append(move)
    return Plan(
        name="reduction",
        world=world,
        buffers=(buffer("input", Role.INPUT, [n * world] * world), buffer("output", Role.OUTPUT, [n] * world)),
        signals=tuple(Signal(name=f"entry {r}", rank=r, kind=ENTRY) for r in range(world))
        + tuple(Signal(name=f"done {r}", rank=r) for r in range(world)),
        queues=tuple(queues),
        goal=st.sequence(*goal),
        sources=st.sources(np.tile(ranks, world), 0, np.repeat(ranks * n, world)),
    )


def strided(count: int = 10_000, layers: int = 80, row: int = 4096) -> Plan:
    """Blocks of a cache, a row per layer each, to another rank's cache in another order."""
    number = np.arange(count)
    rows = st.copy2d((0, 0, number[::-1] * row), (1, 1, number * row), row, layers, count * row, count * row)
    size = count * layers * row
    half = count // 2
    return Plan(
        name="strided",
        world=2,
        buffers=(buffer("pool", Role.INPUT, [size, ABSENT]), buffer("cache", Role.OUTPUT, [ABSENT, size])),
        signals=(*signals("entry 1", rank=1, kind=ENTRY), *signals("done a", "done b", rank=1)),
        queues=(
            queue(0, st.wait(0), rows[:half], st.signal(1)),
            queue(0, st.wait(0), rows[half:], st.signal(2)),
            queue(1, st.signal(0), st.wait(np.array([1, 2]))),
        ),
        goal=rows,
    )


def flags(slabs: int = 4) -> Plan:
    """A kernel of rank 0 raises a flag per slab of its output; copies to rank 1 start slab by slab."""
    n = 32
    number = np.arange(slabs)
    copies = st.copy((0, 0, number * n), (1, 1, number * n), n)
    gated = st.interleave(st.wait(np.full(slabs, 0), number + 1), copies)
    return Plan(
        name="flags",
        world=2,
        buffers=(buffer("c", Role.OUTSIDE, [n * slabs, ABSENT]), buffer("output", Role.OUTPUT, [ABSENT, n * slabs])),
        signals=(
            *signals("flag", kind=IMPORTED),
            *signals("entry 1", rank=1, kind=ENTRY),
            *signals("done", rank=1),
        ),
        queues=(queue(0, st.wait(1), gated, st.signal(2)), queue(1, st.signal(1), st.wait(2))),
        goal=copies,
        external=tuple(
            External(write=Region(rank=0, buffer=0, offset=k * n, length=n), before=(0, k + 1)) for k in range(slabs)
        ),
    )


def two_hosts() -> Plan:
    """Rank 0 stages its input in two halves; a network thread carries each to rank 1's inbox.

    `sent` lets rank 0 fill the stage again, `arrived` lets rank 1 read, and `credit`, a message without bytes, tells
    rank 0 that the inbox is empty for the next run.
    """
    n = 24
    external = []
    for k in (0, 1):
        wire = {
            "read": Region(rank=0, buffer=1, offset=0, length=n),
            "write": Region(rank=1, buffer=2, offset=k * n, length=n),
            "after": (0, k + 1),
        }
        external += [External(**wire, before=(1, k + 1)), External(**wire, before=(2, k + 1))]  # type: ignore[arg-type]
    nothing = Region(rank=1, buffer=2, offset=0, length=0)
    external.append(External(read=nothing, after=(3, 1), before=(4, 1)))
    return Plan(
        name="two hosts",
        world=2,
        buffers=(
            buffer("input", Role.INPUT, [2 * n, ABSENT]),
            buffer("stage", Role.SCRATCH, [n, ABSENT]),
            buffer("inbox", Role.OUTSIDE, [ABSENT, 2 * n]),
            buffer("output", Role.OUTPUT, [ABSENT, 2 * n]),
        ),
        signals=(
            *signals("filled", kind=EXPORTED),
            *signals("sent", kind=IMPORTED),
            *signals("arrived", rank=1, kind=IMPORTED),
            *signals("drained", rank=1, kind=EXPORTED),
            *signals("credit", kind=IMPORTED),
        ),
        queues=(
            queue(
                0,
                st.copy((0, 0, 0), (0, 1, 0), n),
                st.signal(0, 1),
                st.wait(1, 1),
                st.copy((0, 0, n), (0, 1, 0), n),
                st.signal(0, 2),
                st.wait(4, 1),
            ),
            queue(
                1,
                st.wait(2, 1),
                st.copy((1, 2, 0), (1, 3, 0), n),
                st.wait(2, 2),
                st.copy((1, 2, n), (1, 3, n), n),
                st.signal(3, 1),
            ),
        ),
        goal=st.copy((0, 0, 0), (1, 3, 0), 2 * n),
        external=tuple(external),
    )


def captured() -> Plan:
    """All-gather of two ranks by pushing, values absolute, every signal reset by the one that waited for it."""
    n = 16

    def rank(i: int, j: int) -> st.Rows:
        return st.sequence(
            st.signal(i),
            st.wait(j),
            st.reset(j),
            st.copy((i, 0, 0), (j, 1, i * n), n),
            st.signal(2 + j),
            st.copy((i, 0, 0), (i, 1, i * n), n),
            st.wait(2 + i),
            st.reset(2 + i),
        )

    return Plan(
        name="captured",
        world=2,
        buffers=(buffer("input", Role.INPUT, [n, n]), buffer("output", Role.OUTPUT, [2 * n, 2 * n])),
        signals=tuple(Signal(name=f"entry {r}", rank=r, kind=ENTRY) for r in (0, 1)) + signals("done 0", "done 1"),
        queues=(queue(0, rank(0, 1)), queue(1, rank(1, 0))),
        goal=st.sequence(*(st.copy((i, 0, 0), (r, 1, i * n), n) for r in (0, 1) for i in (0, 1))),
        captured=True,
    )


def in_flight() -> Plan:
    """Rank 0 hands its input over through scratch memory of rank 1, which must be empty again before the next run."""
    n = 16
    return Plan(
        name="in flight",
        world=2,
        buffers=(
            buffer("input", Role.INPUT, [n, ABSENT], LOCAL),
            buffer("box", Role.SCRATCH, [ABSENT, n]),
            buffer("output", Role.OUTPUT, [ABSENT, n], LOCAL),
        ),
        signals=signals("full", "empty"),
        queues=(
            queue(0, st.copy((0, 0, 0), (1, 1, 0), n), st.signal(0), st.wait(1)),
            queue(1, st.wait(0), st.copy((1, 1, 0), (1, 2, 0), n), st.signal(1)),
        ),
        goal=st.copy((0, 0, 0), (1, 2, 0), n),
    )


KINDS = {
    "uneven": uneven(),
    "mixed": mixed(),
    "reduction": reduction(),
    "strided": strided(40, 3, 8),
    "flags": flags(),
    "two_hosts": two_hosts(),
    "captured": captured(),
    "in_flight": in_flight(),
}
#: Rank 1 of `mixed` says `ready` once for all chunks, so rank 0's later waits for it hold already.
REDUNDANT = {"mixed": [f"wait ready 1 >= {k}" for k in range(2, COUNT + 1)]}


@pytest.mark.parametrize("kind", KINDS)
def test_is_proved(kind: str) -> None:
    plan = KINDS[kind]
    proof = check(plan)
    assert proof.runs == 2
    assert proof.num_steps == sum(len(q) for q in plan.queues)
    assert faults(plan, runs=3) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_wait_is_needed(kind: str) -> None:
    plan = KINDS[kind]
    for q, i in find(plan, Op.WAIT):
        name = plan.describe(q, i)
        broken = without(plan, q, i)
        if any(name.endswith(r) for r in REDUNDANT.get(kind, ())):
            check(broken)
            continue
        with pytest.raises(PlanError) as error:
            check(broken)
        assert error.value.steps, name
        assert all(str(s) in str(error.value) or "caller" in str(s) for s in error.value.steps), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_signal_is_needed(kind: str) -> None:
    plan = KINDS[kind]
    for q, i in find(plan, Op.SIGNAL):
        if kind == "mixed":
            continue  # a chunk's signal may be replaced by the next one's: the order stays a right one
        with pytest.raises(PlanError, match="deadlock"):
            check(without(plan, q, i))


@pytest.mark.parametrize("op", [Op.SIGNAL, Op.WAIT])
@pytest.mark.parametrize("kind", KINDS)
def test_swapped_signals_are_rejected(kind: str, op: Op) -> None:
    """Pairs of signals, or of waits, of two queues, exchanged. A twin that is accepted must still run well."""
    plan = KINDS[kind]
    words = find(plan, op)
    pairs = [(a, b) for a in words for b in words if a[0] < b[0] and plan.step(*a).signal != plan.step(*b).signal]
    if len(pairs) > 30:
        pairs = random.Random(0).sample(pairs, 30)
    verdicts = [_rejected(swapped(plan, a, b)) for a, b in pairs]
    assert any(verdicts)


def _rejected(plan: Plan) -> bool:
    rejected = rejection(plan) is not None
    assert rejected or faults(plan, schedules=5) == ""
    return rejected


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_source_is_rejected(kind: str) -> None:
    """Every move, reading one unit further on or into the wrong piece."""
    plan = KINDS[kind]
    for q, i in [m for op in (Op.COPY, Op.COPY2D) for m in find(plan, op)][:50]:
        with pytest.raises(PlanError):
            check(changed(plan, q, i, src_offset=plan.step(q, i).src_offset + 1, src_alt=plan.step(q, i).src_alt + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_destination_is_rejected(kind: str) -> None:
    plan = KINDS[kind]
    for q, i in [m for op in (Op.COPY, Op.COPY2D, Op.REDUCE) for m in find(plan, op)][:50]:
        at = plan.step(q, i).dst_offset
        with pytest.raises(PlanError):
            check(changed(plan, q, i, dst_offset=at - 2 if at >= 2 else at + 2))


def test_uneven_splits_need_the_peers_entry() -> None:
    plan = uneven(2)
    steps = plan.queues[0].steps
    late = np.concatenate([steps[[0, 2, 1]], steps[3:]])  # the copy before the wait for rank 1's entry
    with pytest.raises(PlanError, match=r"receive offset 1\.0 before it has seen rank 1 enter"):
        check(with_steps(plan, 0, late))


def test_uneven_pieces_must_not_be_mixed_up() -> None:
    plan = uneven(2)
    copies = find(plan, Op.COPY)
    with pytest.raises(PlanError, match="p4 is not the offset of a piece of this buffer"):
        check(swapped(plan, copies[0], copies[1], "dst_param"))
    with pytest.raises(PlanError, match="length must be that of the piece"):
        check(swapped(plan, copies[0], copies[1], "length_param"))


def test_uneven_chunks_of_a_piece() -> None:
    """A piece in two chunks, the second open-ended; leaving the second out shows."""
    plan = uneven(2)
    whole = plan.queues[0].steps[2:3]
    head, tail = whole.copy(), whole.copy()
    head["length"] = 8
    for column in ("src_offset", "src_alt", "dst_offset", "skip"):
        tail[column] = 8
    steps = plan.queues[0].steps
    check(with_steps(plan, 0, np.concatenate([steps[:2], head, tail, steps[3:]])))
    with pytest.raises(PlanError, match="wrong result: no step writes rank 1 buffer output"):
        check(with_steps(plan, 0, np.concatenate([steps[:2], head, steps[3:]])))
    tail["skip"] = 4
    with pytest.raises(PlanError, match="must be its skip"):
        check(with_steps(plan, 0, np.concatenate([steps[:2], head, tail, steps[3:]])))


def test_mixed_ring_slot_reused_too_early() -> None:
    plan = mixed()
    early = next(w for w in find(plan, Op.WAIT) if plan.describe(*w).endswith("wait freed 0 >= 1"))
    with pytest.raises(PlanError, match=r"race: .* are not ordered on rank 0 buffer view bytes \[0, 16\)") as error:
        check(without(plan, *early))
    queues = {str(s).split(" step ")[0] for s in error.value.steps}
    assert queues == {"rank 0 queue 0 (stage)", "rank 1 queue 0 (pull)"}


def test_mixed_peer_may_not_read_an_ordinary_tensor() -> None:
    plan = mixed()
    view = plan.buffers[2]
    in_place = buffer("view", Role.VIEW, view.sizes, of=0, staged=(False, False))
    broken = plan.replace(buffers=(*plan.buffers[:2], in_place))
    broken = with_steps(broken, 0, st.sequence(st.signal(0, COUNT), st.wait(2, COUNT)))
    with pytest.raises(PlanError, match="rank 0 buffer input bytes .* local to its rank"):
        check(broken)


def test_reduction_order_and_kind_are_part_of_the_goal() -> None:
    plan = reduction()
    sources = plan.sources.copy()
    sources[[0, 1]] = sources[[1, 0]]
    moves = st.reduce((0, 1, 0), 48, len(sources), 8, DType.BFLOAT16, ReduceOp.SUM)
    steps = plan.queues[0].steps.copy()
    steps[8] = moves[0]
    broken = with_steps(plan.replace(sources=np.concatenate([plan.sources, sources])), 0, steps)
    with pytest.raises(PlanError, match="wrong result: rank 0 buffer output bytes .* another reduction"):
        check(broken)
    for column, value in (("dtype", DType.FLOAT16), ("reduce_op", ReduceOp.AVG), ("num_sources", 7)):
        with pytest.raises(PlanError, match="wrong result"):
            check(changed(plan, 0, 8, **{column: value}))


def test_ten_thousand_strided_copies() -> None:
    plan = strided()
    assert min(check(plan).elapsed_ms for _ in range(3)) < 10_000  # far off if a step costs more with each other one
    copies = find(plan, Op.COPY2D)
    with pytest.raises(PlanError, match=r"race: .* \(run 1, writes\) and .* \(run 1, writes\) are not ordered"):
        check(changed(plan, *copies[7], dst_offset=plan.step(*copies[7000]).dst_offset))
    with pytest.raises(PlanError, match="wrong result"):
        check(changed(plan, *copies[7], src_offset=plan.step(*copies[70]).src_offset))
    with pytest.raises(PlanError, match="but the buffer has"):
        check(changed(plan, *copies[7], rows=82))


def test_flag_that_promises_less() -> None:
    """The kernel's promise moves to a later flag: the copy that trusted the earlier one is named."""
    plan = flags()
    last = External(write=plan.external[2].write, before=(0, 4))
    with pytest.raises(PlanError, match="external access that writes rank 0 buffer c bytes") as error:
        check(plan.replace(external=(*plan.external[:2], last, plan.external[3])))
    assert any("copy 32 B r0.c+64" in str(s) for s in error.value.steps)


def test_a_slab_without_a_promise() -> None:
    plan = flags()
    with pytest.raises(PlanError, match="copy 32 B r0.c.96 .* reads rank 0 buffer c .* which nobody has written"):
        check(plan.replace(external=plan.external[:3]))


def test_two_hosts_need_each_promise() -> None:
    plan = two_hosts()
    for left_out in range(4):
        kept = tuple(e for n, e in enumerate(plan.external) if n != left_out)
        if left_out == 2:  # nobody waits for the second `sent`
            check(plan.replace(external=kept))
            continue
        with pytest.raises(PlanError, match="race|nobody has written"):
            check(plan.replace(external=kept))


def test_captured_needs_each_reset() -> None:
    plan = captured()
    for q, i in find(plan, Op.RESET):
        with pytest.raises(PlanError, match="a captured plan must reset"):
            check(without(plan, q, i))


def test_captured_resets_in_the_wrong_place() -> None:
    plan = captured()
    steps = plan.queues[0].steps
    with pytest.raises(PlanError, match="reset entry 1 may come before .* wait entry 1 >= 1 of the same run"):
        check(with_steps(plan, 0, steps[[0, 2, 1, 3, 4, 5, 6, 7]]))
    # Reset after the peer may have entered the next run: it could take down that run's entry.
    with pytest.raises(PlanError, match=r"reset entry 1 of run 1 may come after .* of run 2"):
        check(with_steps(plan, 0, steps[[0, 1, 3, 4, 2, 5, 6, 7]]))


def test_two_runs_in_flight_need_two_lanes() -> None:
    plan = in_flight()
    assert check(plan, in_flight=2).runs == 2
    check(plan, in_flight=2, lanes=3)
    with pytest.raises(PlanError, match="2 runs in flight on 1 lanes share signal full"):
        check(plan, in_flight=2, lanes=1)
    with pytest.raises(PlanError, match="scratch buffer box"):
        check(plan.replace(signals=(), queues=()), in_flight=2, lanes=1)


SMALL = ("uneven", "mixed", "flags", "two_hosts", "captured", "in_flight")


@hs.composite
def mutants(draw: hs.DrawFn) -> Plan:
    """A known-good plan with a few steps removed, exchanged, or waiting for something else."""
    plan = KINDS[draw(hs.sampled_from(SMALL))]
    for _ in range(draw(hs.integers(1, 2))):
        words = [w for op in (Op.WAIT, Op.SIGNAL, Op.RESET) for w in find(plan, op)]
        q, i = draw(hs.sampled_from(words))
        match draw(hs.sampled_from(("drop", "swap", "retarget", "value"))):
            case "drop":
                plan = without(plan, q, i)
            case "swap" if i + 1 < len(plan.queues[q]):
                rows = np.arange(len(plan.queues[q]))
                rows[[i, i + 1]] = rows[[i + 1, i]]
                plan = with_steps(plan, q, plan.queues[q].steps[rows])
            case "retarget":
                plan = changed(plan, q, i, signal=draw(hs.integers(0, len(plan.signals) - 1)))
            case "value":
                plan = changed(plan, q, i, value=draw(hs.integers(1, 4)))
    return plan


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=mutants(), seed=hs.integers(0, 1000))
def test_no_schedule_refutes_a_proof(plan: Plan, seed: int) -> None:
    error = rejection(plan)
    if error is not None:
        assert error.steps
    else:
        assert faults(plan, runs=3, schedules=10, seed=seed) == ""
