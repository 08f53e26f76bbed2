"""What the tests of fused kernels share: inputs that a rank can make for every other, references, delays, mutations.

Inputs are small whole numbers: their products are exact in fp32 whatever the order of the sums, but not in 16 bits, so
a reference can ask for equal bits and still sees where a partial was rounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 100
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def outcomes(file: str, timeout_s: float = 400) -> dict[str, str]:
    """Runs a test file as a program under Triton's interpreter: case -> what is wrong, empty if nothing is."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, file],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def numbers(rank: int, run: int, *shape: int, dtype: torch.dtype, most: int = 4) -> torch.Tensor:
    """Whole numbers that differ by rank, run and shape."""
    made = torch.Generator().manual_seed(hash((rank, run, shape)) & 0x7FFFFFFF)
    return torch.randint(-most, most + 1, shape, generator=made).to(dtype)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w.T, exact, rounded to the dtype."""
    return (x.float() @ w.float().T).to(x.dtype)


def summed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts of one dtype, summed in fp32 in their order, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def differs(got: torch.Tensor, want: torch.Tensor) -> str:
    """What is wrong with `got`, bit for bit."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    wrong = (got != want).nonzero()
    if not len(wrong):
        return ""
    at = tuple(wrong[0].tolist())
    return f"{len(wrong)} of {got.numel()} differ, first {at}: {got[at].item()} instead of {want[at].item()}"


def bags(rank: int, run: int, tables: int, batch: int, rows: Sequence[int], longest: int) -> tuple[Any, Any]:
    """(values, offsets) of random bags, some of them empty."""
    made = torch.Generator().manual_seed(hash((rank, run, tables, batch)) & 0x7FFFFFFF)
    lengths = torch.randint(0, longest + 1, (tables * batch,), generator=made)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.cat(
        [
            torch.randint(0, rows[t], (int(lengths[t * batch : (t + 1) * batch].sum()),), generator=made)
            for t in range(tables)
        ]
    )
    return values, offsets


def pooled(
    weights: Sequence[torch.Tensor], values: torch.Tensor, offsets: torch.Tensor, batch: int, mode: str,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """[batch, tables, dim] by plain torch in fp64, rounded to the dtype."""
    out = torch.zeros(batch, len(weights), weights[0].shape[1], dtype=torch.float64)
    for t, w in enumerate(weights):
        for b in range(batch):
            begin, end = (int(offsets[t * batch + b + k]) for k in (0, 1))
            rows = w[values[begin:end]].double()
            if scales is not None:
                rows = rows * scales[begin:end].double()[:, None]
            out[b, t] = rows.sum(0) / (max(end - begin, 1) if mode == "mean" else 1)
    return out.to(weights[0].dtype)


def nap(rank: int, run: int, most_s: float = 0.02) -> None:
    """A delay that differs by rank and run."""
    time.sleep(random.Random(1000 * rank + run).random() * most_s)


@contextlib.contextmanager
def expecting(replace: Callable[[int, Callable[[], Any]], Any]) -> Iterator[None]:
    """Puts `replace(what, wait)` in the place of every wait of the kernels; `wait()` is the wait itself.

    `what` is a number of `kernels.protocol`: ENTRY, DONE, ARRIVED or LOCAL.
    """
    from dovetail.ops.kernels import fused_embedding, fused_gemm, gemv, protocol

    real = protocol.expect
    modules = (protocol, fused_gemm, gemv, fused_embedding)

    def mutated(*args: Any) -> Any:
        return replace(int(getattr(args[-1], "value", args[-1])), lambda: real(*args))

    for module in modules:
        module.expect = mutated
    try:
        yield
    finally:
        for module in modules:
            module.expect = real


def wait_politely() -> None:
    """Waits of this process's kernels leave their core between two looks: there are more ranks than cores."""
    from dovetail.ops.kernels import protocol

    look = protocol.wait

    def wait(pointer: Any, value: Any, bound: Any) -> Any:
        for _ in range(int(bound.handle.data.item())):
            here = look(pointer, value, 1)
            if here:
                break
            time.sleep(2e-3)
        return here

    protocol.wait = wait


# --- public operators, as if on a GPU


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Calls on CPU tensors go the way of those on a GPU; those whose like was run before, the short one."""
    from dovetail.ops import run

    real = run._is_on_gpu
    run._is_on_gpu = lambda call: True
    try:
        yield
    finally:
        run._is_on_gpu = real


def only_store(group: Any) -> Any:
    """The kernels of a group that has made a call."""
    from dovetail.ops.gpu import transport

    return transport.store_of(group.ops, torch.device("cpu"))


def call(op: str, group: Any, *args: Any, **keywords: Any) -> torch.Tensor:
    """An operator by `store`."""
    from dovetail import ops

    found: torch.Tensor = getattr(ops, op)(*args, group=group, transport="store", **keywords)
    return found


def works(group: Any, m: int = 3, n: int = 5, k: int = 8, run: int = 0) -> str:
    """What is wrong with a sum over ranks."""
    inputs = [
        (
            numbers(r, run, m, k, dtype=torch.float32),
            numbers(r, run + 1, n, k, dtype=torch.float32),
        )
        for r in range(group.size)
    ]
    out = call("gemv_all_reduce", group, *inputs[group.rank])
    return differs(out, summed([product(x, w) for x, w in inputs]))


def raises(kinds: type[BaseException] | tuple[type[BaseException], ...], text: str, work: Callable[[], object]) -> str:
    """What is wrong with the error of `work`."""
    try:
        work()
    except kinds as error:
        return "" if text in str(error) else f"says {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"nothing was raised for {text}"


def guarded(work: Callable[[], str]) -> str:
    """What it says is wrong, or what it raises."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def new_group(dovetail: Any, world: range) -> Any:
    """One whose time limit no case waits for."""
    group = dovetail.new_group(world)
    group.set_timeout(TIMEOUT_S)
    return group


class Recorded:
    """The launches of a store: for poisoned outputs, and for what a graph does: launch again, nothing exchanged."""

    def __init__(self, store: Any) -> None:
        self.launches: list[tuple[Any, tuple[Any, ...], Callable[[], torch.Tensor] | None]] = []
        self.outputs: list[torch.Tensor] = []
        launch, empty = store._launch, store._addresses.empty

        def launched(kernel: Any, blocks: Any, held: Any, first: Any, *rest: Any, then: Any = None, **more: Any) -> Any:
            self.launches.append((kernel, (*first, *rest), then))
            return launch(kernel, blocks, held, first, *rest, then=then, **more)

        def poisoned(shape: Any, dtype: torch.dtype) -> torch.Tensor:
            made: torch.Tensor = empty(shape, dtype)
            if dtype.is_floating_point:
                made.fill_(float("nan"))
                self.outputs.append(made)
            return made

        store._launch, store._addresses.empty = launched, poisoned

    def again(self) -> torch.Tensor | None:
        """The last launch once more, and what is done behind it."""
        kernel, args, then = self.launches[-1]
        kernel[(1,)](*args)
        return then() if then is not None else None
