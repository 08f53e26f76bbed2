"""Jobs of vLLM on plain tensors: the same bytes as naive copies, whatever the groups, chunks and paddings."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from dovetail.errors import DovetailError, NotSupported
from dovetail.kv.choose import Path
from dovetail.kv.planner import Direction, Pieces
from dovetail.kv.vllm.counts import BYTES, TRANSFERS, Counts
from dovetail.kv.vllm.jobs import Caches, Job, Page
from dovetail.kv.vllm.manager import use_runs
from dovetail.kv.vllm.options import Options, Pool
from dovetail.kv.vllm.runs import FreeRuns
from dovetail.kv.vllm.transfers import Transfers, private_memory

NUM_BLOCKS = 32
CPU = "the cache is in host memory"


def layer_outermost(num_layers: int, page: int, *, used: int | None = None) -> list[torch.Tensor]:
    """A tensor for each layer, in one allocation; of each page `used` bytes count."""
    whole = torch.zeros(num_layers, NUM_BLOCKS, page, dtype=torch.int8)
    return [layer[:, : used or page] for layer in whole]


def block_outermost(num_layers: int, page: int) -> list[torch.Tensor]:
    """vLLM names the packed block as one tensor."""
    return [torch.zeros(NUM_BLOCKS, num_layers * page, dtype=torch.int8)]


def caches(groups: list[list[torch.Tensor]], per_chunk: int = 1, *, shared: bool = False) -> Caches:
    """Pages as vLLM counts them: by the tensors in the order of their groups."""
    known: dict[int, tuple[int, int]] = {}  # address -> (padded size, offset)
    for tensors in groups:
        for t in tensors:
            known.setdefault(t.data_ptr(), (t.stride(0), sum(size for size, _ in known.values())))
    pages = [
        [Page(tensor=t, padded_bytes=known[t.data_ptr()][0], offset=known[t.data_ptr()][1]) for t in tensors]
        for tensors in groups
    ]
    return Caches(pages, blocks_per_chunk=per_chunk, shared=shared)


def transfers(
    groups: list[list[torch.Tensor]], num_chunks: int = 6, per_chunk: int = 1, *, shared: bool = False, **options: Any
) -> Transfers:
    given = Options(**{"piece_bytes": 4096, **options})
    made = caches(groups, per_chunk, shared=shared)
    return Transfers.on_cpu(made, private_memory(made, num_chunks, given), given.path)


def job(blocks: Any, chunks: Any, sizes: list[int] | None = None, firsts: list[int] | None = None) -> Job:
    blocks = np.array(blocks, np.int32)  # as vLLM has them
    sizes = sizes or [len(blocks)]
    return Job(blocks=blocks, chunks=np.array(chunks), group_sizes=sizes, block_indices=firsts or [0] * len(sizes))


@some.composite
def groups(draw: some.DrawFn) -> list[list[torch.Tensor]]:
    page = draw(some.sampled_from([16, 48]))
    kind = draw(some.sampled_from(["layer", "block", "padded", "overlaid", "mixed", "shared"]))
    match kind:
        case "layer":
            return [layer_outermost(3, page)]
        case "block":
            return [block_outermost(3, page)]
        case "padded":
            return [layer_outermost(2, page, used=page - 8)]
        case "overlaid":  # two groups of layers in the same bytes: their blocks differ
            tensors = layer_outermost(3, page)
            return [tensors, [t[:, : page - 4] for t in tensors[:2]]]
        case "mixed":
            return [layer_outermost(2, page), [], layer_outermost(3, 2 * page)]
        case _:  # a layer that uses the cache of another one
            tensors = layer_outermost(2, page)
            return [[tensors[0], tensors[1], tensors[0]]]


@settings(max_examples=150, deadline=None)
@given(groups(), some.integers(1, 3), some.booleans(), some.data())
def test_what_was_stored_is_loaded(
    made: list[list[torch.Tensor]], per_chunk: int, shared: bool, data: some.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(some.integers(0, 1000)))
    num_chunks = 30
    moving = transfers(made, num_chunks, per_chunk, shared=shared)
    blocks = rng.permutation(np.arange(1, NUM_BLOCKS)).tolist()  # all groups share one set of them
    free = rng.permutation(num_chunks).tolist()
    wanted, loads = [], ([], [], [], [])  # type: ignore[var-annotated]
    stores: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
    for tensors in made:
        whole = data.draw(some.integers(0, 3))  # chunks of this group
        mine, blocks = blocks[: whole * per_chunk], blocks[whole * per_chunk :]
        chunks, free = free[:whole], free[whole:]
        first = data.draw(some.integers(0, 5)) * per_chunk
        for into, part in zip(stores, (mine, chunks, [len(mine)], [first]), strict=True):
            into += part
        for t in tensors:
            t.copy_(torch.from_numpy(rng.integers(-128, 128, tuple(t.shape), dtype=np.int8)))
        skipped = data.draw(some.integers(0, max(len(mine) - 1, 0)))
        kept = chunks[skipped // per_chunk :]
        wanted.append((mine[skipped:], len(mine) - skipped))
        for into, part in zip(loads, ([], kept, [len(mine) - skipped], [first + skipped]), strict=True):
            into += part
    moving.submit(1, Direction.STORE, job(*stores))
    before = [[t[mine].clone() for t in tensors] for tensors, (mine, _) in zip(made, wanted, strict=True)]
    others = rng.permutation(np.arange(1, NUM_BLOCKS)).tolist()
    places = []
    for tensors in made:
        for t in tensors:
            t.fill_(77)
    for _, size in wanted:
        places.append(others[:size])
        loads[0].extend(others[:size])
        others = others[size:]
    moving.submit(2, Direction.FETCH, job(*loads))
    for tensors, place, expected in zip(made, places, before, strict=True):
        for t, bytes_of in zip(tensors, expected, strict=True):
            assert torch.equal(t[place], bytes_of)
    untouched = sorted(set(range(NUM_BLOCKS)) - {b for place in places for b in place})
    assert all((t[untouched] == 77).all() for tensors in made for t in tensors)
    assert [f.job_id for f in moving.finished()] == [2, 1]  # loads first: a request waits for them
    assert not moving.finished()
    moving.close()
    moving.close()


def test_a_block_is_one_strided_copy_and_in_a_block_outermost_cache_one_plain_one() -> None:
    pieces = Pieces(num_slots=8, slot_bytes=5 * 64, slots_per_piece=8)
    scattered = job([3, 9, 5], [0, 4, 2])
    layer, block = caches([layer_outermost(5, 64)]), caches([block_outermost(5, 64)])
    assert layer.slot_bytes == block.slot_bytes == 5 * 64
    copies = layer.table(Direction.FETCH, scattered, pieces)
    assert (len(copies), copies.rows.tolist()) == (3, [5, 5, 5])
    copies = block.table(Direction.FETCH, scattered, pieces)
    assert (len(copies), copies.rows.tolist()) == (3, [1, 1, 1])
    assert len(block.table(Direction.FETCH, job([3, 4, 5], [1, 2, 3]), pieces)) == 1  # runs merge
    assert copies.size_bytes == 3 * 5 * 64


def test_shared_memory_has_the_format_of_vllm() -> None:
    """In a chunk each tensor has its pages together, padding included."""
    first, second = layer_outermost(2, 32, used=24), layer_outermost(1, 16)
    for n, t in enumerate([*first, *second]):
        t.copy_(torch.arange(NUM_BLOCKS, dtype=torch.int8)[:, None] + 40 * n)
    moving = transfers([first + second], num_chunks=2, per_chunk=3, shared=True)
    moving.submit(1, Direction.STORE, job([4, 9, 5, 7], [1, 0], firsts=[3]))
    found = np.stack([moving.memory.view(n).view(np.int8) for n in (0, 1)])
    assert found.shape == (2, 3 * (32 + 32 + 16))
    wanted = np.zeros_like(found)
    for chunk, place, block in ((1, 0, 4), (1, 1, 9), (1, 2, 5), (0, 0, 7)):
        wanted[chunk, place * 32 : place * 32 + 24] = block
        wanted[chunk, 96 + place * 32 : 96 + place * 32 + 24] = block + 40
        wanted[chunk, 192 + place * 16 : 192 + place * 16 + 16] = block + 80
    assert (found == wanted).all()
    moving.close()


def test_sizes_and_paths_are_counted() -> None:
    moving = transfers([layer_outermost(3, 64)])
    moving.submit(7, Direction.STORE, job([1, 2], [0, 1]))
    moving.submit(8, Direction.FETCH, job([5], [1]))
    assert sorted((f.job_id, f.size_bytes) for f in moving.finished()) == [(7, 2 * 192), (8, 192)]
    store, load = ("store", "cpu", CPU), ("load", "cpu", CPU)
    assert moving.counts.take() == {TRANSFERS: {store: 1, load: 1}, BYTES: {store: 384, load: 192}}
    assert moving.counts.take() == {}
    moving.submit(9, Direction.FETCH, job([5], [1]))
    assert moving.counts.take() == {TRANSFERS: {load: 1}, BYTES: {load: 192}}
    assert str(moving.counts) == f"2 loads by cpu ({CPU}), 384 bytes; 1 stores by cpu ({CPU}), 384 bytes"
    assert str(Counts()) == "no transfers"
    moving.close()


def test_labels_leave_out_the_figures_of_a_reason() -> None:
    found = Counts()
    found.add(Direction.FETCH, Path.DMA_2D, "estimated: dma-2d 12 us, dma-batch 40 us", 10)
    found.add(Direction.FETCH, Path.DMA_2D, "estimated: dma-2d 99 us, dma-batch 140 us", 10)
    assert found.transfers == {("load", "dma-2d", "estimated"): 2}


def test_nothing_is_loaded_into_the_null_block() -> None:
    """vLLM puts it where a sliding window has left blocks behind, as often as it likes."""
    (tensors,) = made = [layer_outermost(2, 16)]
    moving = transfers(made)
    tensors[0][3] = 5
    moving.submit(1, Direction.STORE, job([3, 0], [0, 1]))
    moving.submit(2, Direction.FETCH, job([0, 0, 7], [1, 1, 0]))
    assert (tensors[0][7] == 5).all()
    assert [f.size_bytes for f in moving.finished()] == [32, 64]
    moving.close()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (job([1, 2], [0]), "a job of 2 blocks and 1 chunks: its groups need 2 and 2"),
        (job([1], [0, 1]), "a job of 1 blocks and 2 chunks: its groups need 1 and 1"),
        (job([1, 2], [0, 1], [1, 1]), "2 group sizes and 2 block indices; there are 1 groups"),
        (job([NUM_BLOCKS], [0]), "blocks: 32 is out of range"),
        (job([1], [6]), "slots: 6 is out of range"),
        (job([1, 1], [0, 1]), "fetch: block 1 is named twice"),
    ],
)
def test_jobs_that_do_not_fit_move_nothing(bad: Job, message: str) -> None:
    moving = transfers([layer_outermost(2, 16)])
    with pytest.raises(ValueError, match=message):
        moving.submit(1, Direction.FETCH, bad)
    assert not moving.finished()
    assert not moving.counts.transfers
    moving.close()


def test_what_can_not_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match="moved by the path cpu, not dma-2d"):
        transfers([layer_outermost(2, 16)], path=Path.DMA_2D)
    with pytest.raises(ValueError, match="the host holds 0 chunks of 2 blocks: cpu_bytes_to_use must be at least 64"):
        transfers([layer_outermost(2, 16)], num_chunks=0, per_chunk=2)
    with pytest.raises(ValueError, match="2 KV cache groups have no tensors"):
        transfers([[], []])
    with pytest.raises(ValueError, match="blocks_per_chunk is 0"):
        caches([layer_outermost(2, 16)], 0)


def test_options() -> None:
    found = Options.of({"cpu_bytes_to_use": 5, "dovetail": {"path": "dma-2d", "pool": "dovetail", "piece_bytes": 4096}})
    assert found == Options(path=Path.DMA_2D, pool=Pool.DOVETAIL, piece_bytes=4096)
    assert Options.of({}) == Options()
    for wrong, message in [
        ({"pth": "auto"}, "a table of path, pool, piece_bytes, not {'pth': 'auto'}"),
        ("auto", "not 'auto'"),
        ({"path": "fast"}, "path is one of auto, dma-2d,.* not 'fast'"),
        ({"pool": "lru"}, "pool is one of vllm, dovetail, not 'lru'"),
        ({"piece_bytes": "1G"}, "piece_bytes is a number of bytes, not '1G'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Options.of({"dovetail": wrong})


def test_chunks_are_handed_out_in_runs() -> None:
    free = FreeRuns(8)
    free.reserve(3)
    assert len(free) == 8
    taken = [free.pop() for _ in range(3)]
    assert taken == [0, 1, 2]
    assert [free.pop(), free.pop()] == [3, 4]  # without a reservation too
    for chunk in (1, 3, 4):
        free.append(chunk)
    free.reserve(2)
    assert [free.pop(), free.pop()] == [3, 4]  # not 4 and 3, and not 1
    free.reserve(2)
    free.reserve(4)  # the first reservation was not used
    assert [free.pop() for _ in range(4)] == [1, 5, 6, 7]
    assert len(free) == 0
    free.clear()
    assert len(free) == 8


def test_a_reservation_that_is_refused_leaves_each_chunk_free_once() -> None:
    free = FreeRuns(4)
    free.reserve(2)
    with pytest.raises(DovetailError, match="5 slots were asked for, 4 of 4 are free"):
        free.reserve(5)
    assert len(free) == 4
    assert [free.pop() for _ in range(4)] == [0, 1, 2, 3]


class Manager:
    """As much of vLLM's manager as the pool touches, with the names of one version."""

    def __init__(self, noun: str, total: int) -> None:
        self.noun, self._free_list = noun, []  # type: ignore[var-annotated]
        vars(self).update({f"_num_{noun}": total, f"_num_allocated_{noun}": 0, f"_allocate_{noun}": self.allocate})

    def allocate(self, keys: list[str]) -> list[int]:
        fresh = min(len(keys), vars(self)[f"_num_{self.noun}"] - vars(self)[f"_num_allocated_{self.noun}"])
        assert not fresh  # all of them are in the list
        return [self._free_list.pop() for _ in keys]

    def reset_cache(self) -> None:
        self._free_list.clear()
        vars(self)[f"_num_allocated_{self.noun}"] = 0


@pytest.mark.parametrize("noun", ["chunks", "blocks"])
def test_vllms_manager_takes_runs(noun: str) -> None:
    manager: Any = Manager(noun, 6)
    use_runs(manager)
    use_runs(manager)
    allocate = vars(manager)[f"_allocate_{noun}"]
    assert allocate("abc") == [0, 1, 2]
    manager._free_list.append(1)
    assert allocate("de") == [3, 4]
    assert len(manager._free_list) == 2
    manager.reset_cache()
    assert allocate("abcdef") == [0, 1, 2, 3, 4, 5]
    with pytest.raises(NotSupported, match="does not know the insides of SimpleNamespace"):
        use_runs(SimpleNamespace(_free_list=[]))


def test_kv_does_not_import_vllm() -> None:
    assert "vllm" not in sys.modules
