"""Gates and captures on a real GPU: a kernel that opens a gate, more copies than a stream takes, torch's graphs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import dovetail
from dovetail.errors import NotSupported, Timeout
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.heap import Heap
from dovetail.hw.gpu.local import LocalRunner
from dovetail.plan import Plan, Role, passes
from dovetail.plan import step as st
from dovetail.plan.build.assembly import Assembly
from tests.ranks import workers

PIECE = 64


@pytest.fixture
def device() -> Iterator[Device]:
    with Device("cuda") as made:
        yield made


@pytest.fixture
def heap(device: Device) -> Iterator[Heap]:
    made = Heap(device)
    yield made
    made.close()


def copies(number: int) -> Plan:
    """Inside the GPU, between places that are no progression: one launch each."""
    a = Assembly(f"{number} copies", 1)
    src, dst = a.buffer("input", Role.INPUT, 2 * PIECE * number), a.buffer("output", Role.OUTPUT, 2 * PIECE * number)
    at = np.random.default_rng(1).permutation(number).astype(np.int64) * 2 * PIECE
    a.queue(0, 0, st.copy((0, src, at), (0, dst, at), PIECE))
    return passes.prelaunch(passes.entry(a.plan()))


def buffers(heap: Heap, number: int) -> dict[tuple[int, str], torch.Tensor]:
    made = {(0, name): heap.empty((2 * PIECE * number,), torch.uint8) for name in ("input", "output")}
    made[0, "input"].fill_(7)
    made[0, "output"].fill_(0)
    torch.cuda.synchronize()
    return made


def moved(given: dict[tuple[int, str], torch.Tensor]) -> torch.Tensor:
    return (given[0, "output"].view(-1, 2 * PIECE)[:, :PIECE] == given[0, "input"].view(-1, 2 * PIECE)[:, :PIECE]).cpu()


def test_a_kernel_opens_the_gate(need: Callable[[str, object], None], device: Device, heap: Heap) -> None:
    """What the kernels before it wrote is what moves."""
    need("triton", importlib.util.find_spec("triton"))
    from tests.gpu.openkernel import open_gate

    word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    open_gate[(1,)](word.data_ptr(), 5)  # nothing may be loaded behind a gate
    torch.cuda.synchronize()
    assert int(word) == 5
    given, side = buffers(heap, 8), torch.cuda.Stream()
    with LocalRunner(device, copies(8), timeout_s=10) as runner:
        for value in range(1, 20):
            given[0, "output"].fill_(0)
            torch.cuda.synchronize()
            run = runner.submit(given, gated=True)
            assert not run.is_over()
            address, raised = run.gate()
            with torch.cuda.stream(side):
                given[0, "input"].fill_(value)
                open_gate[(1,)](address, raised)
            run.wait()
            assert bool(moved(given).all())


def test_more_copies_than_a_stream_takes(device: Device, heap: Heap) -> None:
    """The submit blocks behind the gate, which nobody can open before it returns: it ends, and streams go on."""
    given = buffers(heap, 4000)
    with LocalRunner(device, copies(4000), timeout_s=1) as runner:
        run = runner.submit(given, gated=True)
        run.fire()
        with pytest.raises(Timeout, match="gate 'gate 0' was not raised, and the driver took no more"):
            run.wait()
        runner.submit(given).wait()
        assert bool(moved(given).all())


def _in_a_capture() -> list[float]:
    workers.use("cuda")
    workers.all_gather("pcpy", "symmetric", 1000, torch.float32, 1)
    g, x, found = workers.world(), torch.zeros(8, device="cuda"), []
    inp, out = (dovetail.empty(n, dtype=torch.float32, device="cuda").zero_() for n in (100, 100 * g.size))
    options: tuple[dict[str, Any], ...] = ({}, {"async_op": True}, {"async_op": True, "armed": True})
    for keywords in options:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
            with pytest.raises(NotSupported, match="is capturing a graph"):
                dovetail.all_gather_into_tensor(out, inp, variant="pcpy", **keywords)
            x.add_(2)
        graph.replay()
        found.append(float(x[0]))
        workers.all_gather("b2b", "mixed", 1000, torch.float32, 2)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_capture(ranks: int) -> None:
    """A variant of ours is refused in it, the capture is whole, and later calls work."""
    assert dovetail.launch(_in_a_capture, ranks, timeout=60) == [[3.0, 6.0, 9.0]] * ranks
