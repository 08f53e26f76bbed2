"""Random shelves, windows and uses beside a dict of arrays: every reader sees what was written last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.gpulib import Control

from dovetail.hw.gpu.device import Device
from dovetail.kv import Shelf


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    control = Control()
    control.reset()
    control.set(DELAY_US=300)
    with control.device() as gpu:
        yield gpu
    control.reset()


sizes = st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=3).filter(any), min_size=1, max_size=6)
uses = st.lists(
    st.tuples(
        st.sampled_from(["read", "read", "write", "put", "look", "prefetch"]),
        st.lists(st.integers(0, 5), min_size=1, max_size=3),
        st.integers(0, 1),
    ),
    max_size=12,
)
shelves = st.fixed_dictionaries(
    {
        "slots": st.integers(1, 4),
        "page_bytes": st.sampled_from([None, 512, 4096]),
        "piece_bytes": st.sampled_from([1 << 30, 5000, 1]),
    }
)


class Trial:
    """A shelf, the values that its items should have, and what readers saw."""

    def __init__(self, shelf: Shelf, values: dict[int, dict[str, Any]], device: Device | None, seed: int) -> None:
        self.shelf, self.values, self.device = shelf, values, device
        self.rng = np.random.default_rng(seed)
        self.seen: list[tuple[Any, Any]] = []
        self.streams = [device.driver.stream_create() for _ in range(2)] if device else []

    def run(self, what: str, keys: list[int], which: int) -> None:
        keys = list(dict.fromkeys(key % len(self.values) for key in keys))[: len(self.shelf.window.slots)]
        if what == "put":
            self.values[keys[0]] = self.fresh(keys[0])
            self.shelf.put(keys[0], {name: torch.from_numpy(a) for name, a in self.values[keys[0]].items()})
        elif what == "look":
            for name, found in self.shelf.read(keys[0]).items():
                assert (found.numpy() == self.values[keys[0]][name]).all()
        else:
            streams = self.streams[which : which + 1]
            for key, loan in self.shelf.fetch_many(keys).items():
                if what == "prefetch":
                    loan.done(*streams)
                    continue
                loan.join(*streams)
                if what == "write":
                    self.values[key] = self.fresh(key)
                for name, tensor in loan.tensors.items():
                    self.use(tensor, self.values[key][name], streams, what == "write")
                (loan.store if what == "write" else loan.done)(*streams)

    def fresh(self, key: int) -> dict[str, Any]:
        return {name: self.rng.integers(0, 256, len(a), dtype=np.uint8) for name, a in self.values[key].items()}

    def use(self, tensor: Any, value: Any, streams: list[int], write: bool) -> None:
        if not streams:
            if write:
                tensor.numpy()[:] = value
            else:
                assert (tensor.numpy() == value).all()
        elif len(value):
            assert self.device
            host = self.device.pinned(len(value))
            host.array[:] = value if write else 0xEE
            here, there = host.address, tensor.data_ptr()
            self.device.driver.copy(*((there, here) if write else (here, there)), len(value), streams[0])
            if not write:
                self.seen.append((host.array, value))

    def end(self) -> None:
        for stream in self.streams:
            assert self.device
            self.device.driver.stream_synchronize(stream)
            self.device.driver.stream_destroy(stream)
        assert all((found == wanted).all() for found, wanted in self.seen)
        for key, of in self.values.items():
            found = self.shelf.read(key)
            assert all((found[name].numpy() == a).all() for name, a in of.items())


def start(kind: str, device: Device, given_sizes: list[list[int]], options: dict[str, Any], seed: int) -> Trial:
    rng = np.random.default_rng(seed)
    values = {
        key: {f"t{n}": rng.integers(0, 256, size, dtype=np.uint8) for n, size in enumerate(of)}
        for key, of in enumerate(given_sizes)
    }
    items: Any = {key: {name: torch.from_numpy(a) for name, a in of.items()} for key, of in values.items()}
    shelf = Shelf.on_cpu(items, **options) if kind == "cpu" else Shelf.on_gpu(device, items, path=kind, **options)
    return Trial(shelf, values, None if kind == "cpu" else device, seed)


@pytest.mark.parametrize("kind", ["cpu", "dma-2d", "dma-batch"])
def test_every_reader_sees_what_was_written_last(kind: str, device: Device) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(sizes, uses, shelves, st.integers(0, 1 << 30))
    def law(given_sizes: list[list[int]], used: list[Any], options: dict[str, Any], seed: int) -> None:
        trial = start(kind, device, given_sizes, options, seed)
        with trial.shelf:
            for use in used:
                trial.run(*use)
            trial.end()

    law()


@pytest.mark.parametrize("kind", ["cpu", "dma-2d"])
def test_a_walk_visits_all_in_order(kind: str, device: Device) -> None:
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(sizes, st.lists(st.integers(0, 5), max_size=10), shelves, st.integers(0, 3), st.booleans())
    def law(given_sizes: list[list[int]], order: list[int], options: dict[str, Any], ahead: int, store: bool) -> None:
        trial = start(kind, device, given_sizes, options, len(order))
        order = [key % len(given_sizes) for key in order]
        with trial.shelf as shelf:
            visited = []
            for loan in shelf.walk(order, ahead=min(ahead, options["slots"] - 1), store=store):
                loan.wait()
                visited.append(loan.key)
                for name, tensor in loan.tensors.items():
                    wanted = trial.values[loan.key][name]  # type: ignore[index]
                    assert (tensor.numpy() == wanted).all()
                    if store:
                        wanted += 1
                        tensor += 1
            assert visited == order
            trial.end()

    law()
