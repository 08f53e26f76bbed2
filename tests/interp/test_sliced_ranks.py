"""Transport `dma` of ranks with its real kernels: Triton's interpreter, the stand-in driver, one process per rank.

A kernel is over when its launch returns, so nothing overlaps here; that copies wait for flags which come late and in
any order is seen by `tests/ranks/test_gpu_ops.py`, which has no kernels.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
from dovetail.ops.group import ops_group
from tests.interp import fusedlib as lib
from tests.ranks import ops_cases as cases
from tests.ranks.conftest import Pool
from tests.ranks.gpuranks import environment, set_up
from tests.ranks.test_gpu_ops import OPERATORS, call_of, small_slices

OUT_OF_RANGE = "a row out of range"


@pytest.fixture(scope="module")
def outcome(need: Callable[[str, object], None]) -> dict[str, str]:
    need("triton", importlib.util.find_spec("triton"))
    return lib.outcomes(__file__)


@pytest.mark.parametrize("case", [*OPERATORS, OUT_OF_RANGE])
def test_ranks(outcome: dict[str, str], case: str) -> None:
    assert outcome[case] == ""


def _rows_arrive(op: str) -> str:
    g = set_up()
    with small_slices(16):
        for seed in (1, 2, 3, 1):
            problem = cases.some(op, g.size, seed, (torch.float32, torch.bfloat16)[seed % 2])
            with cases.poisoned_memory():
                found = OPERATORS[op](ops_group(g), call_of(problem, g))
            if not problem.is_right(g, found):
                return f"wrong with seed {seed}"
    return ""


def _out_of_range() -> str:
    """It pools nothing; the next check of this rank raises, once."""
    g, said = set_up(), []
    call = call_of(cases.embedding(g.size, 4, 8, torch.float32, 3), g)
    if g.rank == 1:
        call.values[0] = 10**6  # type: ignore[attr-defined]
    OPERATORS[call.op](ops_group(g), call)
    memory = ops_group(g).known["sliced", torch.device("cpu")]
    for _ in range(2):
        try:
            memory.check()
        except IndexError as error:
            said.append(str(error))
    wanted = ["values[0] was not a row of its table; nothing was pooled for it"] if g.rank == 1 else []
    return "" if said == wanted else f"said {said}"


if __name__ == "__main__":
    ranks = Pool(2, environment())
    results = {op: ranks.run(_rows_arrive, op) for op in OPERATORS} | {OUT_OF_RANGE: ranks.run(_out_of_range)}
    ranks.close()
    print(json.dumps({case: "; ".join(filter(None, said)) for case, said in results.items()}))
