"""The device functions under Triton's interpreter, one process per rank, and the example of docs/language.md."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
from dovetail.errors import MismatchError
from tests.interp import fusedlib as lib

PAGE = lib.ROOT / "docs/language.md"
CASES = ("example", "example-lines", "wait-ends", "wait-sees-a-late-signal", "order", "arrive", "epochs", "symmetric")
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


@pytest.fixture(scope="module")
def outcome(need: Callable[[str, object], None]) -> dict[str, str]:
    need("triton", importlib.util.find_spec("triton"))
    pytest.importorskip("dovetail.hw.cpu._native", reason="the native part is not built")
    return lib.outcomes(__file__)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(outcome: dict[str, str], case: str) -> None:
    assert outcome[case] == ""


def test_addresses_of_gpu_memory(outcome: dict[str, str]) -> None:
    """Two ranks whose GPU is a stand-in: segments of either are opened by the other."""
    if COMPILER is None:
        pytest.skip("the stand-in driver needs a C++ compiler")
    assert outcome["gpu-addresses"] == ""


def test_without_triton_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['triton'] = None; import dovetail; import dovetail.language"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=lib.ROOT / "src", capture_output=True, text=True, check=False)
    assert done.returncode
    assert "ImportError" in done.stderr
    assert "dovetail-ml[gpu]" in done.stderr


#: Kernels are a file of their own: Triton reads their source, and this one is imported where Triton is missing too.
KERNELS = """
import triton
import triton.language as tl

from dovetail import language


@triton.jit
def waits(table, out, rank, bound: tl.int64):
    here = language.wait(language.peer(table, rank, tl.int64), 5, bound)
    tl.store(out, here.to(tl.int32))


@triton.jit
def sends(table, data, to, rank):
    lanes = tl.arange(0, 8)
    language.put(language.peer(data, to, tl.float32), lanes, lanes + 10.0 * rank, lanes < 5)
    language.signal(language.peer(table, to, tl.int64), 5)


@triton.jit
def orders(out, rank, world, FIRST: tl.constexpr):
    k = 0
    while k < world:
        tl.store(out + k, language.remote_first(k, rank, world, FIRST))
        k += 1


@triton.jit
def arrives(counter, out, total):
    tl.store(out + tl.program_id(0), language.arrive(counter, total).to(tl.int32))


@triton.jit
def counts(local, out):
    run = language.epoch(local)
    tl.store(out + tl.program_id(0), run)
    language.end_epoch(local, local + 1, run)
"""


# --- the child processes ----------------------------------------------------------------------------------------------


def _example() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(block)


def _run_example(folder: str) -> str:
    import dovetail

    sys.path.insert(0, folder)
    import example_of_the_page as page

    group = dovetail.init()
    got = page.main("cpu", 1000)
    before = (group.rank - 1) % group.size
    return "" if bool((got == 2.0 * (before + 1)).all()) else f"{got[:3]} from rank {before}"


def _functions() -> dict[str, str]:
    import kernels_of_the_test as kernels
    import torch

    import dovetail
    from dovetail import language

    group = dovetail.init()
    found = {}

    flag = language.Symmetric(group, (1,), torch.int64, "cpu")
    data = language.Symmetric(group, (8,), torch.float32, "cpu")
    out = torch.zeros(4, dtype=torch.int32)
    begin = time.monotonic()
    kernels.waits[(1,)](flag.table, out, group.rank, 50)
    found["wait-ends"] = "" if not out[0] and time.monotonic() - begin < 20 else "it said the signal was there"
    data.tensor.fill_(float("nan"))
    dovetail.barrier(group=group)
    if group.rank == 0:
        time.sleep(0.2)
    kernels.sends[(1,)](flag.table, data.table, 1 - group.rank, group.rank)
    kernels.waits[(1,)](flag.table, out, group.rank, 10_000_000)
    right = [k + 10.0 * (1 - group.rank) for k in range(5)]
    good = out[0] and data.tensor[:5].tolist() == right and bool(data.tensor[5:].isnan().all())
    found["wait-sees-a-late-signal"] = "" if good else f"{out[0]} {data.tensor.tolist()}"
    seen = []
    for first in (True, False):
        kernels.orders[(1,)](out, 1, 4, first)
        seen.append(out.tolist())
    found["order"] = "" if seen == [[2, 3, 0, 1], [1, 2, 3, 0]] else f"{seen}"
    counter = torch.zeros(1, dtype=torch.int64)
    seen = []
    for _ in range(3):
        kernels.arrives[(4,)](counter, out, 4)
        seen.append(out.tolist())
    found["arrive"] = "" if seen == [[0, 0, 0, 1]] * 3 and counter.item() == 12 else f"{seen} {counter}"
    local, runs = torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    seen = []
    for _ in range(3):
        kernels.counts[(3,)](local, runs)
        seen.append(runs.tolist())
    found["epochs"] = "" if seen == [[1] * 3, [2] * 3, [3] * 3] else f"{seen}"
    found["symmetric"] = _symmetric(group, language, torch)
    flag.close()
    data.close()
    return found


def _symmetric(group: Any, language: Any, torch: Any) -> str:
    """Addresses lead to the peers' memory; different shapes and tensors elsewhere are refused on every rank."""
    with language.Symmetric(group, (3,), torch.int64, "cpu") as made:
        made.tensor.fill_(group.rank + 7)
        made._addresses.barrier()
        seen = [ctypes.c_int64.from_address(a + 16).value for a in made.table.tolist()]
        made._addresses.barrier()
    if seen != [7, 8] or made.tensor is not None:
        return f"{seen}"
    made.close()
    try:
        language.Symmetric(group, (2 + group.rank,), torch.int64, "cpu")
    except MismatchError as error:
        if "(2,)" not in str(error) or "(3,)" not in str(error):
            return f"says {error}"
    else:
        return "different shapes were taken"
    addresses = language.Addresses.of(group, torch.device("cpu"))
    if addresses.reaches(torch.ones(4)) or not addresses.reaches(addresses.empty((4,), torch.int8)):
        return "does not know which tensors peers reach"
    return ""


def _gpu_addresses() -> str:
    """Several tensors in several segments, of different sizes on each rank; seen where a peer says they are."""
    import numpy as np
    import torch

    import dovetail
    from dovetail import language

    group = dovetail.new_group([1, 0])
    addresses = language.Addresses.of(group, "cuda:0")
    sizes = [3 << 20, 1000, 5 << 20][: 2 + (group.rank == 0)]
    held = [addresses.empty((n,), torch.uint8).fill_(16 * group.rank + k) for k, n in enumerate(sizes)]
    table, notes = addresses.exchange([held[-1], held[0], held[0][:0]], f"rank {group.rank}".encode())
    if notes != [b"rank 0", b"rank 1"] or table[:, 2].any():
        return f"{notes} {table}"
    seen = [
        set(np.ctypeslib.as_array((ctypes.c_uint8 * 1000).from_address(int(at))).tolist())
        for at in table[:, :2].reshape(-1)
    ]
    addresses.barrier()
    ordinary = addresses.reaches(torch.ones(4))
    return "" if seen == [{2}, {0}, {17}, {16}] and not ordinary else f"{seen} {ordinary}"


def _main() -> None:
    import tempfile

    import dovetail

    lines = [line for line in _example().splitlines() if line.strip()]
    found = {"example-lines": "" if len(lines) <= 32 else f"{len(lines)} lines"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "example_of_the_page.py").write_text(_example())
        Path(folder, "kernels_of_the_test.py").write_text(KERNELS)
        both = dovetail.launch(_both, 2, args=(folder,), timeout=100)
    for case in both[0]:
        found[case] = next((f"rank {rank}: {seen[case]}" for rank, seen in enumerate(both) if seen[case]), "")
    if COMPILER is not None:
        from tests import standin

        env = {"DOVETAIL_CUDA_LIBRARY": str(standin.build("cuda")), "DOVETAIL_GPU_SEGMENT": "4M"}
        found["gpu-addresses"] = "; ".join(filter(None, dovetail.launch(_gpu_addresses, 2, timeout=60, env=env)))
    print(json.dumps(found))


def _both(folder: str) -> dict[str, str]:
    return {"example": _run_example(folder), **_functions()}


if __name__ == "__main__":
    _main()
