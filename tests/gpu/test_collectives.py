"""The suite of the collectives on real GPUs: the tests of tests/ranks with tensors on a GPU that all ranks share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.hw.gpu.driver import load
from dovetail.measure.machine import profile_key
from dovetail.profile import Profile, save
from tests.ranks import test_collectives as suite
from tests.ranks.conftest import Pool

RANKS = int(os.environ.get("DOVETAIL_TEST_RANKS", "4"))


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pool whose tensors are on the GPU, and whose `auto` may take our path: the suite is the test."""
    driver = load("cuda")
    passed = {"device": driver.device_name(0), "driver": driver.version, "passed": True}
    path = Path(tmp_path_factory.mktemp("profile")) / "profile.json"
    save(Profile(key=profile_key([RANKS]), sections={"selftest": {"cuda": passed}}), path)
    pool = Pool(RANKS, {"DOVETAIL_PROFILE": str(path), "DOVETAIL_CHECK": "0"})
    pool.run(_on_gpu)

    class One:
        def get(self, ranks: int) -> Pool:
            assert ranks == RANKS
            return pool

    yield One()
    pool.close()


def _on_gpu() -> None:
    from tests.ranks import workers

    torch.cuda.set_device(workers.world().rank % torch.cuda.device_count())
    workers.use("cuda")


@pytest.mark.parametrize("kind", suite.KINDS)
@pytest.mark.parametrize(
    "test",
    [
        suite.test_all_gather,
        suite.test_all_to_all,
        suite.test_all_reduce,
        suite.test_reduce_scatter,
        suite.test_rooted,
        suite.test_uneven_all_to_all,
    ],
    ids=lambda t: t.__name__.removeprefix("test_"),
)
def test_every_kind(pools: Any, test: Any, kind: str) -> None:
    test(pools, RANKS, kind)


@pytest.mark.parametrize(
    "test",
    [suite.test_reductions_of_every_dtype, suite.test_in_place, suite.test_subgroups, suite.test_random_calls],
    ids=lambda t: t.__name__.removeprefix("test_"),
)
def test_every_group(pools: Any, test: Any) -> None:
    test(pools, RANKS)
