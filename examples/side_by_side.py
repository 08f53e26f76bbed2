"""What examples 07 to 09 share: flags, a shelf on the CPU or on a GPU, and timing in turns.

Share of ideal: of the speedup that perfect overlap would give, (compute + copy) / max(compute, copy), what was reached.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dovetail.hw.gpu.device import Device
from dovetail.kv import Shelf


def arguments(about: str, cpu: Mapping[str, int], cuda: Mapping[str, int]) -> Any:
    """--backend and a flag for each size, with defaults for each backend."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=5, help="of each contender, in turns")
    for name in cpu:
        parser.add_argument(f"--{name}", type=int, help=f"cpu: {cpu[name]}, cuda: {cuda[name]}")
    found = parser.parse_args()
    for name, value in (cuda if found.backend == "cuda" else cpu).items():
        if getattr(found, name) is None:
            setattr(found, name, value)
    if found.backend == "cpu":
        torch.set_num_threads(1)  # steady times also where others compute
    return found


@contextlib.contextmanager
def shelf_on(backend: str, items: Mapping[Any, Mapping[str, torch.Tensor]], slots: int) -> Iterator[Shelf]:
    """A shelf with its window on the backend."""
    if backend == "cpu":
        with Shelf.on_cpu(items, slots=slots) as shelf:
            yield shelf
        return
    torch.cuda.init()  # torch and the shelf share one context
    with Device("cuda") as gpu, Shelf.on_gpu(gpu, items, slots=slots) as shelf:
        yield shelf
        torch.cuda.synchronize()


def current_stream(backend: str) -> list[int]:
    """torch's, as `after` takes it; the CPU has none."""
    return [torch.cuda.current_stream().cuda_stream] if backend == "cuda" else []


def finish(backend: str) -> None:
    """All work so far is done."""
    if backend == "cuda":
        torch.cuda.synchronize()


def in_turns(backend: str, repeats: int, contenders: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The median time of each in milliseconds; each once in turn, the first turn not counted."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, work in contenders.items():
            finish(backend)
            begin = time.perf_counter()
            work()
            finish(backend)
            if turn:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def link_gbps(backend: str, size_bytes: int = 1 << 28) -> float:
    """One large plain copy to the backend's memory, of pinned memory where there is a GPU."""
    source = torch.ones(size_bytes if backend == "cuda" else size_bytes >> 4, dtype=torch.uint8)
    source = source.pin_memory() if backend == "cuda" else source
    target = torch.empty_like(source, device=backend)
    found = in_turns(backend, 5, {"copy": lambda: target.copy_(source, non_blocking=True)})
    return source.numel() / found["copy"] / 1e6


def report(backend: str, times: Mapping[str, float], one_way_bytes: int, steps: int, what: str) -> None:
    """`times`: of `steps` steps, without overlap, with it, of the computation alone and of the copies alone."""
    without, overlapped = times["without"], times["with"]
    compute, copy = times["compute"], times["copy"]
    ideal, gbps = max(compute, copy), link_gbps(backend)
    bound = one_way_bytes / gbps / 1e6
    print(f"{backend}, milliseconds per {what}, {one_way_bytes / steps / 1e6:.1f} MB of fetches each:")
    print(f"  without overlap {without / steps:.3f}, with {overlapped / steps:.3f}: {without / overlapped:.2f}x")
    print(f"  compute alone {compute / steps:.3f}, copies alone {copy / steps:.3f}")
    print(f"  link: one large copy {gbps:.1f} GB/s, so the fetches of a {what} take at least {bound / steps:.3f}")
    if backend == "cpu":
        print("  copies run on the calling thread here, so nothing overlaps")
        return
    speedup, best = (compute + copy) / overlapped, (compute + copy) / ideal
    print(f"  ideal {ideal / steps:.3f}: {ideal / overlapped:.0%} of its speed, ", end="")
    print(f"share of ideal speedup {(speedup - 1) / (best - 1):.0%}")


def compare(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Fails where values differ by more than rounding."""
    if torch.equal(found, wanted):
        print(f"{name}: equal to the plain computation, bit for bit")
    else:
        torch.testing.assert_close(found, wanted)
        print(f"{name}: equal to the plain computation, to rounding")
