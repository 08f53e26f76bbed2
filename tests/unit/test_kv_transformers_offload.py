"""Contexts in host memory: the logits of a plain cache, however few layers the device holds, however late they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.llama import LateMover, differ, generate, llama, prompt, same

from dovetail.errors import NotSupported
from dovetail.kv.plain import CpuMover
from dovetail.kv.prefixes import _flat
from dovetail.kv.transformers import CacheFull, KVShape, OffloadedCache, PagedCache, PagedMemory, order
from dovetail.kv.transformers import rotation as rotating

LAYERS = 6
MODEL = llama(LAYERS)
SHAPE = KVShape.of(MODEL)
IDS = prompt(50)


pytestmark = pytest.mark.usefixtures("one_thread")


def poison(cache: OffloadedCache) -> None:
    """Buffers of no-numbers: what was not fetched shows."""
    cache._tokens.fill_(float("nan"))


@pytest.mark.parametrize("buffers", [2, 3, 4])
@pytest.mark.parametrize("resident", [0, 1, 2, 6])
def test_the_logits_of_a_plain_cache(buffers: int, resident: int) -> None:
    plain = generate(MODEL, IDS)
    with OffloadedCache(SHAPE, 80, resident_layers=resident, num_buffers=buffers) as cache:
        poison(cache)
        assert same(generate(MODEL, IDS, cache), plain)
        held = min(LAYERS, resident + buffers)
        assert cache.device_bytes == held * 5 * SHAPE.row_bytes


def test_a_second_turn_goes_on_where_the_first_ended() -> None:
    from transformers import DynamicCache

    plain = DynamicCache(config=MODEL.config)
    with OffloadedCache(SHAPE, 120) as cache:
        for mine in (cache, plain):
            first = generate(MODEL, IDS, mine, new=9)
        longer = torch.cat([first.sequences, prompt(20, 3)], dim=1)
        assert differ(generate(MODEL, longer, cache), generate(MODEL, longer, plain)) < 1e-4
        cache.crop(-40)
        shorter = longer[:, : cache.get_seq_length() + 5]
        assert differ(generate(MODEL, shorter, cache, new=3), generate(MODEL, shorter, new=3)) < 1e-4
        cache.reset()
        assert same(generate(MODEL, IDS, cache), generate(MODEL, IDS))


def test_a_batch() -> None:
    ids = prompt(24, 4, batch=3)
    with OffloadedCache(SHAPE, 64, num_sequences=3) as cache:
        poison(cache)
        assert same(generate(MODEL, ids, cache), generate(MODEL, ids))
        with pytest.raises(ValueError, match="of 3 sequences, a batch of 1 came"):
            generate(MODEL, IDS, cache)
        with pytest.raises(NotSupported, match="no beam search"):
            cache.reorder_cache(torch.tensor([0, 0, 1]))


class Late:
    """A cache whose bytes land when somebody waits for them, no sooner."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def make(gpu: Any, tokens: torch.Tensor, host: Any) -> LateMover:
            self.mover = LateMover(tokens.reshape(-1).view(torch.uint8).numpy(), _flat(host))
            return self.mover

        monkeypatch.setattr(rotating, "_mover", make)
        self.cache = OffloadedCache(SHAPE, 80, num_buffers=2)
        poison(self.cache)


def test_bytes_that_come_late_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(monkeypatch)
    plain = generate(MODEL, IDS)
    with late.cache as cache:
        assert same(generate(MODEL, IDS, cache), plain)
    assert {direction for direction, _ in late.mover.log} == {"fetch", "store"}


@pytest.mark.parametrize("removed", ["join of a fetch", "wait for a store"])
def test_without_the_wait_it_goes_wrong(removed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(monkeypatch)
    plain = generate(MODEL, IDS)
    if removed == "join of a fetch":
        monkeypatch.setattr(order, "join", lambda *_: None)
    else:
        monkeypatch.setattr(order.Fence, "behind", lambda *_: None)
    with late.cache as cache:
        assert differ(generate(MODEL, IDS, cache), plain) > 0.1


class Worst:
    """Of all orders that a GPU may take the worst: computation is done at once, and a copy not before somebody waits
    for it, then behind what it was told to be behind. To tell a fence of a copy is not to wait for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fences: list[list[Copy]] = []
        before: dict[str, Copy] = {}  # of a direction, whose copies follow each other

        class Fence:
            def __init__(self, _: Any) -> None:
                self.after = (len(fences),)
                self.told: list[Copy] = []
                fences.append(self.told)

            def behind_compute(self) -> None:
                """It is done."""

            def behind(self, transfer: Copy) -> None:
                self.told.append(transfer)

            def enter(self) -> None:
                for transfer in self.told:
                    transfer.wait()

        class Mover(CpuMover):
            def submit(self, direction: Any, table: Any, path: Any = "cpu", *, after: Any = (), **_: Any) -> Any:
                behind = [other for fence in after for other in fences[fence]]
                behind += [before[direction]] if direction in before else []
                before[direction] = Copy(lambda: CpuMover.submit(self, direction, table), behind)
                return before[direction]

        def make(gpu: Any, tokens: torch.Tensor, host: Any) -> Mover:
            return Mover(tokens.reshape(-1).view(torch.uint8).numpy(), _flat(host))

        monkeypatch.setattr(order, "Fence", Fence)
        monkeypatch.setattr(rotating, "_mover", make)


class Copy:
    def __init__(self, move: Callable[[], Any], behind: list[Copy]) -> None:
        self._move: Callable[[], Any] | None = move
        self._behind = behind

    def is_over(self) -> bool:
        return self._move is None

    def wait(self, timeout_s: float = 60.0) -> None:
        move, self._move = self._move, None
        if move is not None:
            for other in self._behind:
                other.wait()
            move()


@pytest.mark.parametrize("buffers", [2, 3, 4])
def test_the_worst_order_of_copies(buffers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that nothing is fetched into is written behind the copies that still store from it."""
    Worst(monkeypatch)
    longer = torch.cat([IDS, prompt(20, 3)], dim=1)
    with OffloadedCache(SHAPE, 120, num_buffers=buffers) as cache:
        poison(cache)
        assert same(generate(MODEL, IDS, cache), generate(MODEL, IDS))
        cache.reset()
        assert same(generate(MODEL, IDS, cache, new=3), generate(MODEL, IDS, new=3))
        cache.crop(-9)
        shorter = longer[:, : cache.get_seq_length() + 5]
        assert differ(generate(MODEL, shorter, cache, new=3), generate(MODEL, shorter, new=3)) < 1e-4


@pytest.mark.parametrize("removed", ["behind", "enter"])
def test_in_the_worst_order_each_wait_is_needed(removed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Worst(monkeypatch)
    monkeypatch.setattr(order.Fence, removed, lambda *_: None)
    with OffloadedCache(SHAPE, 120) as cache:
        poison(cache)
        assert not differ(generate(MODEL, IDS, cache), generate(MODEL, IDS)) < 0.1


def test_only_new_blocks_are_stored_and_only_filled_ones_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[str, int]] = []
    submit = LateMover.submit

    def noted(self: LateMover, direction: Any, table: Any, *rest: Any, **more: Any) -> Any:
        sizes.append((str(direction), table.size_bytes // SHAPE.row_bytes))
        return submit(self, direction, table, *rest, **more)

    monkeypatch.setattr(LateMover, "submit", noted)
    with Late(monkeypatch).cache as cache:
        generate(MODEL, IDS, cache, new=2)  # 50 tokens are 4 blocks; then one token in the last of them
    stores = [count for direction, count in sizes if direction == "store"]
    assert stores == [4] * LAYERS + [1] * LAYERS
    assert {count for direction, count in sizes if direction == "fetch"} == {4}


def test_a_closed_cache_says_so() -> None:
    with OffloadedCache(SHAPE, 80) as cache:
        generate(MODEL, IDS, cache, new=1)
    with pytest.raises(ValueError, match="this cache is closed: make a new one"):
        generate(MODEL, torch.cat([IDS, prompt(3)], dim=1), cache, new=1)


def test_memory_of_inference_mode_serves_outside_of_it() -> None:
    with torch.inference_mode():
        made = OffloadedCache(SHAPE, 80), PagedMemory(SHAPE, 16)
    with made[0] as cache:
        assert same(generate(MODEL, IDS, cache), generate(MODEL, IDS))
    with PagedCache(made[1]) as paged:
        assert same(generate(MODEL, IDS, paged), generate(MODEL, IDS))


def test_memory_is_no_part_of_a_graph() -> None:
    """It would keep the graphs of all requests that were ever made."""
    memory = PagedMemory(SHAPE, 16)
    with PagedCache(memory) as paged, OffloadedCache(SHAPE, 80) as cache:
        for each in (paged, cache):
            assert MODEL(input_ids=IDS, past_key_values=each).logits.requires_grad
        assert not memory.tokens.requires_grad
        assert not cache._tokens.requires_grad


def test_no_room_is_said_before_anything_is_written() -> None:
    with OffloadedCache(SHAPE, 40) as cache:
        with pytest.raises(CacheFull, match="holds 40 tokens of a sequence, 50 are needed"):
            generate(MODEL, IDS, cache)
        assert cache.get_seq_length() == 0
        assert not cache._tokens.any()
        assert cache.get_max_length() == 40


def test_a_budget_of_the_device() -> None:
    layer = 5 * SHAPE.row_bytes  # 80 tokens
    for budget, resident in ((2 * layer, 0), (5 * layer - 1, 2), (6 * layer, 6), (60 * layer, 6)):
        with OffloadedCache.for_model(MODEL, 80, device_bytes=budget) as cache:
            assert (cache.resident_layers, cache.device_bytes <= budget) == (resident, True)
            assert same(generate(MODEL, IDS, cache, new=5), generate(MODEL, IDS, new=5))
    with pytest.raises(ValueError, match=f"2 buffers of a layer need {2 * layer}"):
        OffloadedCache.for_model(MODEL, 80, device_bytes=2 * layer - 1)
    for wrong in ({"num_buffers": 1}, {"resident_layers": 7}, {"num_sequences": 0}):
        with pytest.raises(ValueError, match="or more"):
            OffloadedCache(SHAPE, 80, **wrong)
