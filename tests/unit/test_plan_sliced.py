"""The sliced all-to-all: any cut of any splits is proved, moves what a plain model moves, and needs its waits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from dovetail.errors import PlanError
from dovetail.plan import ABSENT, Op, Plan, Role, SignalKind, passes
from dovetail.plan.build.sliced import MOST_SIGNALS, Done, Flags, Own, Slice, sliced_all_to_all
from dovetail.plan.check import check

from .planlib import changed, faults, find, rejection, without

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Splits:
    """Rows of every pair of ranks, cut into slices; a row is `width` bytes, in an output that may have wider ones."""

    def __init__(self, world: int, seed: int, *, strided: bool, pulled: bool = False) -> None:
        self.world, self.random = world, random.Random(seed)
        self.rows = [[self.random.choice([0, 0, 1, 2, 3, 5]) for _ in range(world)] for _ in range(world)]
        self.width = [self.random.choice([1, 2, 4]) for _ in range(world)] if strided else [4] * world
        if strided:  # as embeddings: every rank has some columns of all rows, a destination has the same rows of all
            for j in range(world):
                for i in range(world):
                    self.rows[i][j] = self.rows[0][j]
        self.strided, self.pulled = strided, pulled
        self.slices = [piece for i in range(world) for piece in self._of(i)]
        self.random.shuffle(self.slices)

    def _at(self, i: int, j: int) -> tuple[int, int, int]:
        """Where piece i -> j begins in its source and in its destination, and the pitch there."""
        source = sum(self.rows[i][:j]) * self.width[i]
        if self.strided:
            return source, sum(self.width[:i]), sum(self.width)
        return source, sum(self.rows[k][j] for k in range(i)) * self.width[0], self.width[0]

    def _of(self, i: int) -> list[Slice]:
        made = []
        for j in range(self.world):
            source, destination, pitch = self._at(i, j)
            cuts = sorted({0, self.rows[i][j], *(self.random.randint(0, self.rows[i][j]) for _ in range(2))})
            for begin, end in zip(cuts, cuts[1:] or cuts, strict=False):
                made.append(
                    Slice(
                        source=i, destination=j, source_offset=source + begin * self.width[i],
                        destination_offset=destination + begin * pitch, rows=end - begin, row_bytes=self.width[i],
                        destination_pitch=pitch, mover=self.random.choice([i, j]) if self.pulled else None,
                    )
                )  # fmt: skip
        return made

    def wanted(self, own: bool) -> dict[tuple[int, int], tuple[int, int]]:
        """(rank, byte of its output) -> (rank, byte of its y): the model, byte by byte."""
        found = {}
        for i in range(self.world):
            for j in range(self.world):
                source, destination, pitch = self._at(i, j)
                for row in range(self.rows[i][j] if own or i != j else 0):
                    for byte in range(self.width[i]):
                        found[j, destination + row * pitch + byte] = (i, source + row * self.width[i] + byte)
        return found


def moved(plan: Plan) -> dict[tuple[int, int], tuple[int, int]]:
    """What the goal says, in the form of `Splits.wanted`."""
    found = {}
    for row in plan.goal:
        pitches = int(row["src_pitch"]), int(row["dst_pitch"])
        for k in range(int(row["rows"])):
            for byte in range(int(row["length"])):
                to = int(row["dst_rank"]), int(row["dst_offset"]) + k * pitches[1] + byte
                found[to] = int(row["src_rank"]), int(row["src_offset"]) + k * pitches[0] + byte
    return found


shapes = some.fixed_dictionaries(
    {
        "world": some.integers(1, 8), "seed": some.integers(0, 1 << 20), "strided": some.booleans(),
        "pulled": some.booleans(),
    }
)  # fmt: skip
ways = some.fixed_dictionaries(
    {
        "flags": some.sampled_from(Flags), "own": some.sampled_from(Own), "done": some.sampled_from(Done),
        "lanes": some.integers(1, 3),
    }
)  # fmt: skip


@FEW
@given(shape=shapes, way=ways, ready=some.sets(some.integers(0, 7), max_size=3))
def test_any_splits(shape: dict[str, Any], way: dict[str, Any], ready: set[int]) -> None:
    splits = Splits(**shape)
    plan = sliced_all_to_all(splits.world, splits.slices, ready=ready, **way)
    assert moved(plan) == splits.wanted(own=way["own"] is Own.COPIED)
    check(passes.entry(plan))
    if splits.world <= 3:
        assert not faults(passes.entry(plan), schedules=3)


@settings(FEW, max_examples=25)
@given(shape=shapes, way=ways)
def test_no_wait_can_go(shape: dict[str, Any], way: dict[str, Any]) -> None:
    """But those of the handshake, which are proved elsewhere."""
    splits = Splits(**(shape | {"world": min(shape["world"], 4)}))
    plan = passes.entry(sliced_all_to_all(splits.world, splits.slices, **way))
    waits = [
        at for at in find(plan, Op.WAIT)
        if plan.signals[plan.queues[at[0]].steps["signal"][at[1]]].kind is not SignalKind.ENTRY
    ]  # fmt: skip
    for at in random.Random(shape["seed"]).sample(waits, min(len(waits), 12)):
        assert rejection(without(plan, *at)) is not None, plan.describe(*at)


def test_a_promise_that_is_too_small_is_found() -> None:
    plan = passes.entry(sliced_all_to_all(2, [rows_to(1, 0), rows_to(1, 8, destination_offset=8)]))
    at = next(at for at in find(plan, Op.COPY))
    error = rejection(changed(plan, *at, length=9))
    assert error is not None
    assert "not ordered" in str(error)


def steps(plan: Plan, rank: int = 0) -> list[str]:
    """Of all queues of a rank, in their order."""
    return [
        plan.describe(n, i).partition(": ")[2]
        for n, q in enumerate(plan.queues) if q.rank == rank for i in range(len(q))
    ]  # fmt: skip


def rows_to(destination: int, offset: int, **more: Any) -> Slice:
    given = {"source": 0, "destination_offset": 0, "row_bytes": 8} | more
    return Slice(destination=destination, source_offset=offset, **given)


def test_slices_go_in_the_order_given() -> None:
    plan = sliced_all_to_all(3, [rows_to(2, 0), rows_to(0, 16), rows_to(1, 8), rows_to(1, 24, destination_offset=8)])
    assert steps(plan) == [
        "wait slice 0 >= 1", "copy 8 B r0.y+0 -> r2.output+0", "signal done 0->2 = 1",
        "wait slice 1 >= 1", "copy 8 B r0.y+16 -> r0.output+0",
        "wait slice 2 >= 1", "copy 8 B r0.y+8 -> r1.output+0",
        "wait slice 3 >= 1", "copy 8 B r0.y+24 -> r1.output+8", "signal done 0->1 = 1",
    ]  # fmt: skip
    assert steps(plan, 1) == ["wait done 0->1 >= 1"]
    assert [b.sizes for b in plan.buffers] == [(32, ABSENT, ABSENT), (ABSENT,) * 3, (8, 16, 8)]
    assert [b.role for b in plan.buffers] == [Role.OUTSIDE, Role.INPUT, Role.OUTPUT]


def test_counters_grow_for_each_destination() -> None:
    slices = [rows_to(1, 0), rows_to(1, 8, destination_offset=8), rows_to(0, 16)]
    plan = sliced_all_to_all(2, slices, flags="destination")
    assert [s for s in steps(plan) if s.startswith("wait")] == [
        "wait slices 0->1 >= 1", "wait slices 0->1 >= 2", "wait slices 0->0 >= 1"
    ]  # fmt: skip


def test_memory_in_step_with_the_computation() -> None:
    """A peer that is memory: its slice comes when the computation has ended one of its own; ready ones at once."""
    back = Slice(source=1, destination=0, source_offset=0, destination_offset=0, row_bytes=8, mover=0)
    paced = sliced_all_to_all(2, [rows_to(1, 0), back], follows={1: 0}, done="end")
    check(passes.entry(paced))
    assert steps(paced) == [
        "wait slice 0 >= 1", "copy 8 B r0.y+0 -> r1.output+0", "wait over 0.0 >= 1", "signal done 0: 1 = 1",
        "wait slice 0 >= 1", "copy 8 B r1.y+0 -> r0.output+0", "signal over 0.0 = 1",
    ]  # fmt: skip
    early = sliced_all_to_all(2, [rows_to(1, 0), back], ready={1}, done="end")
    check(passes.entry(early))
    assert "copy 8 B r1.input+0 -> r0.output+0" in steps(early)
    assert len([s for s in early.signals if s.kind is SignalKind.IMPORTED]) == 1
    free = sliced_all_to_all(2, [rows_to(1, 0), back], ready={0, 1}, done="end")
    assert not [s for s in free.signals if s.kind is SignalKind.IMPORTED]


def test_own_slices_end_with_the_rank() -> None:
    for own in (Own.PLACED, Own.LEFT):
        plan = sliced_all_to_all(1, [rows_to(0, 0), rows_to(0, 8, destination_offset=8)], own=own)
        assert steps(plan) == ["wait slice 0 >= 1", "wait slice 1 >= 1"]
        assert {e.write.buffer for e in plan.external if e.write} == {2 if own is Own.PLACED else 0}


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (rows_to(2, 0), "destination is rank 2 in a world of 2"),
        (rows_to(1, -8), "source at -8"),
        (rows_to(1, 0, rows=2, destination_pitch=4), "destination at 0 with rows of 8 bytes every 4"),
        (rows_to(1, 0, rows=-1), "-1 rows of 8 bytes"),
        (rows_to(0, 0, mover=1), "can't be moved by rank 1"),
    ],
)
def test_slices_that_cannot_be(piece: Slice, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sliced_all_to_all(2, [piece])


def test_sizes_and_followers_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"y_bytes is \[4, 0\]; the slices of 2 ranks need \[8, 0\]"):
        sliced_all_to_all(2, [rows_to(1, 0)], y_bytes=[4, 0])
    with pytest.raises(ValueError, match="slice 1 can't follow slice 0"):
        sliced_all_to_all(2, [rows_to(1, 0, rows=0), rows_to(1, 0)], follows={1: 0})


def test_too_many_signals() -> None:
    many = [rows_to(1, 8 * k, destination_offset=8 * k) for k in range(MOST_SIGNALS + 1)]
    with pytest.raises(PlanError, match=f"rank 0 has {MOST_SIGNALS + 1} signals, room is for {MOST_SIGNALS}: make"):
        sliced_all_to_all(2, many)
    check(passes.entry(sliced_all_to_all(2, many[1:])))
    counted = sliced_all_to_all(2, many, flags=Flags.DESTINATION)
    assert np.unique([s.rank for s in counted.signals], return_counts=True)[1].tolist() == [1, 1]
