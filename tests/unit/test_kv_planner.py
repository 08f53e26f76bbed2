"""Layouts and the plan of a fetch or a store: the same bytes as naive copies, few copies, nothing named twice."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dovetail.errors import PlanError
from dovetail.kv.layout import Group, Layout, block_outermost, layer_outermost, of_tensors
from dovetail.kv.planner import Direction, Pieces, Table, as_plan, layer_tables, plan, table
from dovetail.plan import Op, Plan, passes
from dovetail.plan.check import check

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def random_bytes(rng: np.random.Generator, size: int) -> Bytes:
    return rng.integers(0, 256, size, dtype=np.uint8)


def naive(direction: Direction, layout: Layout, blocks: list[int], slots: list[int], cache: Bytes, pool: Bytes) -> None:
    """Row by row, as the definition of a layout says."""
    for block, slot in zip(blocks, slots, strict=True):
        at = slot * layout.slot_bytes
        for group in layout.groups:
            columns = (group.bases.tolist(), group.strides.tolist(), group.places.tolist())
            for base, stride, place in zip(*columns, strict=True):
                at = at if group.packed else slot * layout.slot_bytes + place
                on_device = slice(base + block * stride, base + block * stride + group.row_bytes)
                on_host = slice(at, at + group.row_bytes)
                if direction is Direction.FETCH:
                    cache[on_device] = pool[on_host]
                else:
                    pool[on_host] = cache[on_device]
                at += group.row_bytes


def run(made: Plan, cache: Bytes, pool: Bytes, pieces: Pieces) -> None:
    """The plan's rows, one after the other; a copy may not leave its piece."""
    memory = [cache]
    for n in range(pieces.count):
        begin = n * pieces.slots_per_piece * pieces.slot_bytes
        memory.append(pool[begin : begin + pieces.size_bytes(n)])
    for row in made.queues[0].steps:
        if row["op"] not in (Op.COPY, Op.COPY2D):
            continue
        src, dst = memory[row["src_buffer"]], memory[row["dst_buffer"]]
        for k in range(int(row["rows"])):
            a = int(row["src_offset"] + k * row["src_pitch"])
            b = int(row["dst_offset"] + k * row["dst_pitch"])
            n = int(row["length"])
            assert a + n <= len(src)
            assert b + n <= len(dst)
            dst[b : b + n] = src[a : a + n]


@some.composite
def layouts(draw: some.DrawFn) -> Layout:
    num_blocks = draw(some.integers(1, 12))
    kind = draw(some.sampled_from(["layer", "block", "gaps", "irregular", "groups", "places"]))
    layers, row, split = draw(some.integers(1, 5)), draw(some.integers(1, 9)), draw(some.booleans())
    sizes = {"num_layers": layers, "row_bytes": row, "num_blocks": num_blocks, "split": split}
    if kind == "layer":
        return layer_outermost(kind, **sizes)
    if kind == "gaps":
        return layer_outermost(kind, **sizes, gap_bytes=draw(some.integers(1, 7)))
    if kind == "block":
        return block_outermost(kind, **sizes)
    groups, at, place = [], 0, 0
    for n in range(1 if kind == "irregular" else draw(some.integers(2, 3))):
        width = draw(some.integers(1, 6))
        bases = []
        for _ in range(draw(some.integers(1, 6))):  # allocations at any distance, in any order
            at += draw(some.integers(0, 3))
            bases.append(at)
            at += num_blocks * width
        bases, places = draw(some.permutations(bases)), None
        if kind == "places":  # anywhere in the slot, often equally spaced
            gap = draw(some.integers(0, 3))
            places = [place + k * (width + gap) for k in range(len(bases))]
            place = places[-1] + width
            places = places if draw(some.booleans()) else draw(some.permutations(places))
        groups.append(Group(f"g{n}", width, bases, width, num_blocks, places=places))
    return Layout(kind, tuple(groups))


@settings(max_examples=150, deadline=None)
@given(layout=layouts(), data=some.data(), direction=some.sampled_from(Direction), seed=some.integers(0, 1 << 30))
def test_a_plan_moves_what_naive_copies_move(
    layout: Layout, data: some.DataObject, direction: Direction, seed: int
) -> None:
    pieces = Pieces(
        num_slots=data.draw(some.integers(1, 12)),
        slot_bytes=layout.slot_bytes,
        slots_per_piece=data.draw(some.integers(1, 12)),
    )
    most = min(layout.num_blocks, pieces.num_slots)
    count = data.draw(some.integers(0, most))
    pick = some.booleans()
    blocks = list(range(count)) if data.draw(pick) else data.draw(some.permutations(range(layout.num_blocks)))[:count]
    slots = list(range(count)) if data.draw(pick) else data.draw(some.permutations(range(pieces.num_slots)))[:count]
    made = plan(direction, layout, blocks, slots, pieces)
    rng = np.random.default_rng(seed)
    cache, pool = random_bytes(rng, layout.size_bytes), random_bytes(rng, pieces.num_slots * pieces.slot_bytes)
    wanted_cache, wanted_pool = cache.copy(), pool.copy()
    naive(direction, layout, blocks, slots, wanted_cache, wanted_pool)
    run(made, cache, pool, pieces)
    assert (cache == wanted_cache).all()
    assert (pool == wanted_pool).all()
    copies = table(direction, layout, blocks, slots, pieces)
    assert copies.size_bytes == count * sum(group.num_rows * group.row_bytes for group in layout.groups)
    assert copies.num_rows == copies.rows.sum()
    if copies.form:  # told by the planner, not found in the columns
        for name in ("width", "rows", "device_pitch", "host_pitch"):
            assert (getattr(copies, name) == getattr(copies.form, name)).all()
        assert not ((copies.device | copies.width | copies.device_pitch) % copies.form.unit_bytes).any()


def test_a_table_knows_its_form_where_no_block_follows_another() -> None:
    """And one that was made of it does not, since nobody knows what was changed."""
    pieces = Pieces(num_slots=40, slot_bytes=5 * 96, slots_per_piece=40)
    for layout, form in (
        (layer_outermost("x", num_layers=5, row_bytes=96, num_blocks=80), (96, 5, 80 * 96, 96, 32)),
        (block_outermost("x", num_layers=5, row_bytes=96, num_blocks=80), (480, 1, 480, 480, 32)),
        (Layout("x", (Group("blocks apart", 96, [0, 80 * 104], 104, 80),)), (96, 2, 80 * 104, 96, 8)),
    ):
        apart = table("fetch", layout, np.arange(0, 80, 2), np.arange(40), pieces)
        assert apart.form == form
        assert apart.by_shape() == [apart]
        assert apart.split(480) is apart
        assert table("fetch", layout, np.arange(7, 47), np.arange(40), pieces).form is None
        for made in (dataclasses.replace(apart, device=apart.device + 1), apart.where(np.arange(9)), apart.split(200)):
            assert made.form is None or made is apart
            assert made.size_bytes == int(made.width @ made.rows)
            assert made.num_rows == int(made.rows.sum())
    assert table("fetch", layout, [], [], pieces).form is None


@settings(max_examples=60, deadline=None)
@given(layouts(), some.integers(1, 4), some.integers(0, 1 << 30), some.sampled_from(Direction))
def test_layer_by_layer_it_is_the_same_bytes_and_layers_come_in_order(
    layout: Layout, step: int, seed: int, direction: Direction
) -> None:
    pieces = Pieces(num_slots=12, slot_bytes=layout.slot_bytes, slots_per_piece=5)
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, layout.num_blocks + 1))
    blocks, slots = rng.permutation(layout.num_blocks)[:count], rng.permutation(12)[:count]
    if not layout.num_layers:
        with pytest.raises(ValueError, match="has 0 layers"):
            layer_tables(direction, layout, blocks, slots, pieces)
        return
    parts = layer_tables(direction, layout, blocks, slots, pieces, layers=step)
    assert len(parts) == -(-layout.num_layers // step)
    cache, pool = random_bytes(rng, layout.size_bytes), random_bytes(rng, 12 * pieces.slot_bytes)
    wanted_cache, wanted_pool = cache.copy(), pool.copy()
    naive(direction, layout, blocks.tolist(), slots.tolist(), wanted_cache, wanted_pool)
    for n, part in enumerate(parts):
        run(as_plan(direction, layout, part, pieces), cache, pool, pieces)
        if direction is Direction.FETCH:  # what is in by now is right, layer by layer
            group = layout.groups[0]
            for row, layer in enumerate(layout.layers[0]):
                for block in blocks.tolist() if layer < (n + 1) * step else []:
                    at = int(group.bases[row] + block * group.strides[row])
                    assert (cache[at : at + group.row_bytes] == wanted_cache[at : at + group.row_bytes]).all()
    assert (cache == wanted_cache).all()
    assert (pool == wanted_pool).all()


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("make", [layer_outermost, block_outermost])
def test_the_checker_proves_such_a_plan(direction: Direction, make: Any) -> None:
    layout = make("x", num_layers=3, row_bytes=64, num_blocks=16, split=True)
    pieces = Pieces(num_slots=16, slot_bytes=layout.slot_bytes, slots_per_piece=5)
    check(passes.entry(plan(direction, layout, [3, 4, 5, 9, 0], [7, 8, 9, 10, 2], pieces)))


def copies(layout: Layout, blocks: Any, slots: Any, slots_per_piece: int = 1000) -> Table:
    pieces = Pieces(num_slots=1000, slot_bytes=layout.slot_bytes, slots_per_piece=slots_per_piece)
    return table("fetch", layout, blocks, slots, pieces)


def test_layers_at_one_pitch_are_one_copy_for_each_block() -> None:
    layout = layer_outermost("x", num_layers=80, row_bytes=16384, num_blocks=500)
    found = copies(layout, [7, 3, 400], [1, 5, 9])
    assert len(found) == 3
    assert set(found.rows.tolist()) == {80}
    assert set(found.device_pitch.tolist()) == {500 * 16384}
    assert set(found.host_pitch.tolist()) == {16384}


def test_a_layer_stride_above_two_gib_is_one_copy_too() -> None:
    layout = layer_outermost("x", num_layers=32, row_bytes=65536, num_blocks=50_000)
    assert layout.groups[0].runs[0].pitch > 1 << 31
    assert len(copies(layout, [49_999], [0])) == 1


def test_a_block_that_is_contiguous_on_both_sides_is_one_plain_copy_and_runs_of_them_merge() -> None:
    layout = block_outermost("x", num_layers=80, row_bytes=8192, num_blocks=500)
    found = copies(layout, [10, 11, 12, 40], [0, 1, 2, 3])
    assert found.rows.tolist() == [1, 1]
    assert sorted(found.width.tolist()) == [layout.slot_bytes, 3 * layout.slot_bytes]
    cut = copies(layout, [10, 11, 12], [0, 1, 2], slots_per_piece=2)  # never across two registrations
    assert sorted(cut.width.tolist()) == [layout.slot_bytes, 2 * layout.slot_bytes]


def test_which_rows_can_be_staged() -> None:
    """Those that are strided on the device and follow each other on the host."""
    layers = layer_outermost("x", num_layers=4, row_bytes=512, num_blocks=50)
    assert layers.strided_rows == {512}
    assert block_outermost("x", num_layers=4, row_bytes=512, num_blocks=50).strided_rows == frozenset()
    apart = Group("apart", 256, [0, 20_000], 256, 50, places=[0, 1024])
    short = Group("short", 128, [40_000, 50_000, 60_000], 128, 50, places=[2048, 2176, 2304])
    one = Group("one", 64, [70_000], 64, 50, places=[4096])
    assert Layout("groups", (apart, short, one)).strided_rows == {128}


def test_long_stretches_go_down_the_blocks_and_short_ones_down_the_layers() -> None:
    layout = layer_outermost("x", num_layers=4, row_bytes=512, num_blocks=500)
    assert len(copies(layout, range(100), range(100))) == 4  # a copy for each layer
    assert len(copies(layout, range(3), range(3))) == 3  # a copy for each block


def test_only_rows_that_are_equally_spaced_are_folded() -> None:
    group = Group("x", 100, [0, 1000, 2000, 3500, 4500, 9000], 100, 10)
    assert [(r.first, r.count, r.pitch) for r in group.runs] == [(0, 3, 1000), (3, 2, 1000), (5, 1, 100)]
    assert len(copies(Layout("x", (group,)), [2], [0])) == 3


def test_rows_that_descend_are_never_folded() -> None:
    group = Group("x", 100, [2000, 1000, 0], 100, 10)
    assert [r.count for r in group.runs] == [1, 2] or [r.count for r in group.runs] == [1, 1, 1]


@pytest.mark.parametrize(
    ("blocks", "slots", "message"),
    [
        ([1, 2], [1], "blocks and slots must be pairs, not 2 and 1"),
        ([10], [0], r"blocks: 10 is out of range; there are 0\.\.9"),
        ([-1], [0], "blocks: -1 is out of range"),
        ([0], [8], r"slots: 8 is out of range; there are 0\.\.7"),
        ([0.5], [0], "blocks must be whole numbers, not float64"),
        ([4, 4], [0, 1], "fetch: block 4 is named twice"),
    ],
)
def test_bad_ids_are_refused_before_anything_moves(blocks: Any, slots: Any, message: str) -> None:
    layout = layer_outermost("x", num_layers=2, row_bytes=64, num_blocks=10)
    pieces = Pieces(num_slots=8, slot_bytes=layout.slot_bytes, slots_per_piece=4)
    with pytest.raises(ValueError, match=message):
        plan("fetch", layout, blocks, slots, pieces)


def test_one_slot_may_be_read_twice_but_not_written_twice() -> None:
    layout = layer_outermost("x", num_layers=2, row_bytes=64, num_blocks=10)
    pieces = Pieces(num_slots=8, slot_bytes=layout.slot_bytes, slots_per_piece=4)
    assert table("fetch", layout, [1, 2], [3, 3], pieces).size_bytes == 2 * layout.slot_bytes
    with pytest.raises(ValueError, match="store: slot 3 is named twice"):
        plan("store", layout, [1, 2], [3, 3], pieces)


def test_slots_may_be_larger_than_blocks() -> None:
    """As where caches with different blocks share a pool."""
    layout = layer_outermost("x", num_layers=2, row_bytes=64, num_blocks=10)
    pieces = Pieces(num_slots=4, slot_bytes=200, slots_per_piece=4)
    rng = np.random.default_rng(1)
    cache, pool = random_bytes(rng, layout.size_bytes), random_bytes(rng, 800)
    wanted = pool.copy()
    for block, slot in ((4, 1), (5, 2), (0, 3)):
        for row in range(2):
            on_device = row * 640 + block * 64
            wanted[slot * 200 + row * 64 :][:64] = cache[on_device : on_device + 64]
    run(plan("store", layout, [4, 5, 0], [1, 2, 3], pieces), cache, pool, pieces)
    assert (pool == wanted).all()


def test_a_pool_of_other_slots_is_refused() -> None:
    layout = layer_outermost("x", num_layers=2, row_bytes=64, num_blocks=10)
    with pytest.raises(ValueError, match="a slot of the pool has 100 bytes, a block of layout x 128"):
        plan("fetch", layout, [0], [0], Pieces(num_slots=4, slot_bytes=100, slots_per_piece=4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, [0, 4], 8, 3), "rows 0 and 1 share bytes"),
        ((8, [0, 16, 24], 24, 3), "rows 0 and 2 share bytes"),  # row 2 of a block is row 0 of the next
        ((8, [0, 24, 72], 24, 3), "rows 0 and 1 share bytes"),
        ((8, [0, 72, 8, 16], 24, 3), None),
        ((8, [0, 8], 16, 3), None),  # interleaved, as K and V packed by block
        ((8, [0, 24], 8, 3), None),
        ((8, [0], 4, 3), "blocks at least 8 bytes apart"),
        ((0, [0], 8, 3), "row_bytes and num_blocks of at least 1"),
        ((8, [], 8, 3), "needs rows"),
        ((8, [-8], 8, 3), "bases must not be negative"),
        ((8, [0, 24], 8, 3, [0, 4]), "each row needs a place of its own, 8 bytes, in a slot"),
        ((8, [0, 24], 8, 3, [0]), "each row needs a place"),
        ((8, [0, 24], 8, 3, [-8, 8]), "each row needs a place"),
        ((8, [0, 24], 8, 3, [64, 8]), None),
    ],
)
def test_rows_that_alias_are_refused(arguments: tuple[Any, ...], message: str | None) -> None:
    *rest, places = [*arguments, None][:5]
    if message is None:
        Group("x", *rest, places=places)
        return
    with pytest.raises(ValueError, match=message):
        Group("x", *rest, places=places)


def test_groups_have_places_of_their_own() -> None:
    def layout(place: int) -> Layout:
        groups = Group("a", 16, [0], 16, 4, places=[place]), Group("b", 32, [64], 32, 4, places=[8])
        return Layout("x", groups)

    with pytest.raises(ValueError, match="rows of groups a and b share bytes of a slot"):
        layout(0)
    with pytest.raises(ValueError, match="rows of groups b and a share bytes of a slot"):
        layout(32)
    assert layout(40).slot_bytes == 56


def test_groups_must_fit_together() -> None:
    a, b = Group("a", 8, [0], 8, 3), Group("b", 8, [100], 8, 4)
    with pytest.raises(ValueError, match="the same number of blocks, found a 3, b 4"):
        Layout("x", (a, b))
    placed = Group("b", 8, [100], 8, 3, places=[8])
    with pytest.raises(ValueError, match="either all groups have places in a slot or none has"):
        Layout("x", (a, placed))
    with pytest.raises(ValueError, match="at least one group"):
        Layout("x", ())
    with pytest.raises(ValueError, match="an entry for each row"):
        Layout("x", (a,), ((0, 1),))


def test_the_layout_of_tensors_that_exist() -> None:
    torch = pytest.importorskip("torch")
    whole = torch.zeros(3, 2, 10, 4, 8)  # layer, K and V, block, tokens, width
    layout, base = of_tensors("x", [[whole[n, 0], whole[n, 1]] for n in range(3)])
    assert base == whole.data_ptr()
    assert layout.groups[0].row_bytes == 4 * 8 * 4
    assert [(r.count, r.pitch) for r in layout.groups[0].runs] == [(6, 10 * 4 * 8 * 4)]
    packed = torch.zeros(10, 3, 2, 4, 8)
    layout, _ = of_tensors("x", [[packed[:, n]] for n in range(3)])
    assert [(r.count, r.pitch, r.stride) for r in layout.groups[0].runs] == [(3, 256, 768)]
    with pytest.raises(ValueError, match="is not contiguous"):
        of_tensors("x", [[whole[0, 0].transpose(1, 2)]])
    with pytest.raises(ValueError, match="the same number of blocks"):
        of_tensors("x", [[whole[0, 0]], [whole[1, 0][:5]]])
    mixed, _ = of_tensors("x", [[whole[0, 0]], [torch.zeros(10, 3, 8)]])
    assert [g.row_bytes for g in mixed.groups] == [128, 96]
    assert mixed.layers == ((0,), (1,))


@given(some.integers(1, 5000), some.lists(some.tuples(some.integers(1, 40), some.integers(1, 300)), max_size=8))
def test_a_split_moves_the_same_rows_in_smaller_copies(most_bytes: int, shapes: list[tuple[int, int]]) -> None:
    """Rows keep their order and their two ends; no copy is larger, unless it is a single row."""
    rows, width = (np.array([shape[k] for shape in shapes], np.int64) for k in range(2))
    begin = np.cumsum(rows * (width + 7)) - rows * (width + 7)
    whole = Table(begin, 0 * rows, 2 * begin, width, rows, width + 7, width + 3)
    parts = whole.split(most_bytes)

    def ends(copies: Table) -> list[tuple[int, int, int]]:
        sides = zip(copies.device, copies.device_pitch, copies.host, copies.host_pitch, strict=True)
        return [
            (int(d + r * d_pitch), int(h + r * h_pitch), int(width))
            for (d, d_pitch, h, h_pitch), width, rows in zip(sides, copies.width, copies.rows, strict=True)
            for r in range(int(rows))
        ]

    assert ends(parts) == ends(whole)
    assert ((parts.rows * parts.width <= most_bytes) | (parts.rows == 1)).all()
    groups = parts.by_shape()
    assert sum(map(len, groups)) == len(parts)
    assert all(len({(int(w), int(r)) for w, r in zip(g.width, g.rows, strict=True)}) == 1 for g in groups)


def test_faults_of_a_large_plan_are_found_where_they_are() -> None:
    """Tables of thousands of rows are checked one by one, and a goal that is part of a queue with that queue."""
    layout = layer_outermost("x", num_layers=4, row_bytes=64, num_blocks=20_000)
    pieces = Pieces(num_slots=10_000, slot_bytes=layout.slot_bytes, slots_per_piece=4096)
    made = plan("fetch", layout, np.arange(0, 20_000, 2), np.arange(10_000), pieces)
    assert len(made.goal) == 10_000
    steps, goal = made.queues[0].steps.copy(), made.goal.copy()
    steps["dst_rank"][7000] = 5
    queue = dataclasses.replace(made.queues[0], steps=steps)
    with pytest.raises(PlanError, match="queue 0 step 7000: dst rank out of range"):
        made.replace(queues=(queue, made.queues[1]))
    goal["src_buffer"][9999] = 99
    with pytest.raises(PlanError, match="goal step 9999: src buffer out of range"):
        made.replace(goal=goal)
