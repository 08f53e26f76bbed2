"""The operators as modules: what they show of themselves, and the sizes that they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail import ops as fused
from tests.ranks import workers


@pytest.mark.parametrize("world", [2])
def test_a_module_shows_its_sizes(pools: Any, world: int) -> None:
    def job() -> tuple[str, str]:
        workers.world()
        return repr(fused.RowParallelLinear(8, 5, bias=True)), repr(fused.ExpertParallelLinear(4, 3, transport="store"))

    row, expert = pools.get(world).run(job)[0]
    sizes = "in_features=8, out_features=5, bias=True, 4 input features on each of 2 ranks"
    assert row == f"RowParallelLinear({sizes}, transport='auto')"
    assert expert == "ExpertParallelLinear(in_features=4, out_features=3, transport='store')"


@pytest.mark.parametrize("world", [2])
def test_wrong_sizes(pools: Any, world: int) -> None:
    """With the caller's own word for what is wrong."""

    def job() -> None:
        workers.world()
        for sizes, name in (((0, 5), "in_features"), ((-8, 5), "in_features"), ((8, 0), "out_features")):
            for kind in (fused.RowParallelLinear, fused.ExpertParallelLinear):
                with pytest.raises(ValueError, match=f"{name} must be at least 1, not "):
                    kind(*sizes)
        with pytest.raises(TypeError, match="in_features must be a whole number, not 8.0"):
            fused.RowParallelLinear(8.0, 5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="dim must be at least 1, not 0"):
            fused.EmbeddingAllToAll([4], 0)
        row = fused.RowParallelLinear(8, 5)
        for shape in ((3, 8), (), (4, 1)):
            with pytest.raises(ValueError, match="last dimension of 4, this rank's part of 8 input features"):
                row(torch.zeros(shape))

    pools.get(world).run(job)
