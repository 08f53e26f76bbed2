"""The fused operators with several ranks on one GPU: all five by stores, some by other transports, graphs, errors.

Kernels of different ranks wait for each other, so they must run at the same time: with MPS they do; without it the GPU
slices time between processes, and everything takes milliseconds longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dovetail.hw.gpu.driver import load
from dovetail.measure.machine import profile_key
from dovetail.profile import Profile, save
from tests.gpu import fusedlib
from tests.ranks.conftest import Pool

RANKS = [int(n) for n in os.environ.get("DOVETAIL_TEST_FUSED_RANKS", "2,4").split(",")]
REPLAYS = int(os.environ.get("DOVETAIL_TEST_REPLAYS", "100"))

Make = Callable[[int], Pool]


@pytest.fixture(scope="module")
def pool_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Pools whose collectives, for gradients, may take our path: tests/gpu/test_collectives.py tries that."""
    driver = load("cuda")
    passed = {"device": driver.device_name(0), "driver": driver.version, "passed": True}
    path = Path(tmp_path_factory.mktemp("profile")) / "profile.json"
    save(Profile(key=profile_key(RANKS), sections={"selftest": {"cuda": passed}}), path)
    made: dict[int, Pool] = {}

    def get(ranks: int) -> Pool:
        if ranks not in made:
            made[ranks] = Pool(ranks, {"DOVETAIL_PROFILE": str(path)})
        return made[ranks]

    yield get
    for pool in made.values():
        pool.close()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize(("transport", "least"), [("store", 13), ("dma", 7), ("decomposed", 6)])
def test_all_operators(
    pool_of: Make, ranks: int, dtype: torch.dtype, ragged: bool, transport: str, least: int
) -> None:  # fmt: skip
    for seed in (11, 222, 3333):
        assert min(pool_of(ranks).run(fusedlib.all_operators, dtype, seed, ragged, transport)) >= least


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_rows_and_many_columns(pool_of: Make, ranks: int, dtype: torch.dtype) -> None:
    pool_of(ranks).run(fusedlib.few_rows, dtype)


@pytest.mark.parametrize("ranks", RANKS)
def test_calls_whose_like_was_run_before(pool_of: Make, ranks: int) -> None:
    """The third of each is the first that can go the shortest way: what Triton compiled is known by then."""
    rounds = 12
    assert min(pool_of(ranks).run(fusedlib.repeats, rounds)) >= 8 * (rounds - 4)


@pytest.mark.parametrize("ranks", RANKS)
def test_captured_graphs_are_replayed_with_changing_inputs(pool_of: Make, ranks: int) -> None:
    assert max(pool_of(ranks).run(fusedlib.replays, REPLAYS)) < 2e-2


def test_a_kernel_that_could_wait_for_ever_is_refused(pool_of: Make) -> None:
    for said in pool_of(RANKS[0]).run(fusedlib.too_many):
        assert f"{RANKS[0]} ranks share this GPU" in said


def test_a_row_number_out_of_range_is_an_error_on_every_rank(pool_of: Make) -> None:
    found = pool_of(RANKS[0]).run(fusedlib.out_of_range)
    assert found[0][0].startswith("IndexError")
    assert all(said[0].startswith("MismatchError") and "IndexError" in said[0] for said in found[1:])
    assert all(said[1].startswith("(") for said in found)


def test_a_late_rank_ends_every_kernel(pool_of: Make) -> None:
    """The last one: its group is broken."""
    found = pool_of(RANKS[0]).run(fusedlib.late)
    assert any("Timeout" in said for said in found), found
