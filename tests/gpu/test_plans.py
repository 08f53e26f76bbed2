"""Random plans on GPU memory give the CPU executor's bytes. `python -m tests.gpu.random_plans 10000` runs many more."""

from __future__ import annotations

import pytest

import dovetail
from tests.gpu import random_plans


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_random_plans(ranks: int) -> None:
    for found in dovetail.launch(random_plans.compare, ranks, (10_000 * ranks, 60, "cuda"), timeout=200):
        assert found["wrong"] == []
