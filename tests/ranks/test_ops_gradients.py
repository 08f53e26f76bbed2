"""What comes with the operators' gradients: second derivatives, and tables that are updated in place as they come."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail import ops as fused
from dovetail.errors import NotSupported
from dovetail.ops import reference
from tests.ranks import workers


@pytest.mark.parametrize("world", [2])
def test_second_derivatives(pools: Any, world: int) -> None:
    """As in one process, where nothing is sent. That of GEMV is one value that all ranks have, by its own rule."""

    def job() -> None:
        g = workers.world()
        for op in ("gemm_all_to_all", "all_gather_matmul", "matmul_reduce_scatter"):
            shapes = [(4, 3), (5, 3)] * world
            full = [torch.randn(s, dtype=torch.float64, generator=_seeded(n)) for n, s in enumerate(shapes)]
            leaves = [t.clone().requires_grad_() for t in full]
            want = _second(getattr(reference, op)(leaves[::2], leaves[1::2]), leaves)
            mine = [t.clone().requires_grad_() for t in full[2 * g.rank : 2 * g.rank + 2]]
            got = _second([getattr(fused, op)(*mine)], mine)
            torch.testing.assert_close(got, want[2 * g.rank : 2 * g.rank + 2])
        table = torch.randn(4, 2, requires_grad=True)
        out = fused.embedding_all_to_all([table], torch.tensor([0, 3]), torch.tensor([0, 1, 2]))
        (of_table,) = torch.autograd.grad(out.square().sum(), table, create_graph=True)
        with pytest.raises(NotSupported, match="no second derivatives"):
            of_table.to_dense().square().sum().backward()

    pools.get(world).run(job)


def _seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def _second(outs: list[torch.Tensor], of: list[torch.Tensor]) -> list[torch.Tensor]:
    """Derivatives of what derivatives add up to."""
    first = torch.autograd.grad(sum((out**3).sum() for out in outs), of, create_graph=True)
    return list(torch.autograd.grad(sum((t**2).sum() for t in first), of))


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("world", [2])
def test_tables_in_place(pools: Any, world: int, optimizer: str) -> None:
    """A table that requires no gradient stays; row numbers may be of 32 bits; tables must be as they were where the
    gradient of a value's weight needs them."""

    def job() -> None:
        g = workers.world()
        adagrad = optimizer == "rowwise_adagrad"
        tables = [torch.randn(5, 3, generator=_seeded(n + 7 * g.rank)) for n in range(2)]
        before = [t.clone() for t in tables]
        state = [torch.zeros(5) for _ in tables] if adagrad else []
        tables[1].requires_grad_()
        values = torch.tensor([0, 4, 4, 2], dtype=torch.int32)
        how: Any = {"optimizer": optimizer, "state": state, "lr": 0.5}
        fused.embedding_all_to_all(tables, values, torch.arange(5), **how).sum().backward()
        assert torch.equal(tables[0], before[0])
        assert not any(s.any() for s in state[:1])
        changed = (tables[1].detach() != before[1]).any(1)
        assert changed.tolist() == [False, False, True, False, True]
        scales = torch.ones(4, requires_grad=True)
        how["per_sample_weights"] = scales
        outs = [fused.embedding_all_to_all(tables, values, torch.arange(5), **how) for _ in range(2)]
        with pytest.raises(RuntimeError, match="needs the tables as they were"):
            sum(out.sum() for out in outs).backward()
        # Also where one rank has nothing for the table in the other call: a step is one on every rank.
        how["per_sample_weights"] = scales[: 4 * (1 - g.rank)]
        offsets = torch.arange(5) * (1 - g.rank)
        outs = [fused.embedding_all_to_all(tables, values, torch.arange(5), **{**how, "per_sample_weights": scales})]
        outs.append(fused.embedding_all_to_all(tables, values[: 4 * (1 - g.rank)], offsets, **how))
        with pytest.raises(RuntimeError, match="needs the tables as they were"):
            sum(out.sum() for out in outs).backward()

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2])
def test_compiled_scales(pools: Any, world: int) -> None:
    """Their gradient, with the tables updated in place inside the graph's backward: as without a compiler."""

    def job() -> None:
        g = workers.world()
        torch._dynamo.reset()
        tables = [torch.randn(5, 3, generator=_seeded(g.rank)).requires_grad_() for _ in range(2)]
        values, offsets = torch.tensor([0, 4, 4, 2]), torch.arange(5)

        def call(table: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            return fused.embedding_all_to_all(
                [table], values, offsets, per_sample_weights=scales, num_tables=2, optimizer="sgd", lr=0.5
            )

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for step in range(3):
            found = []
            for run, table in zip((call, compiled), tables, strict=True):
                scales = torch.full((4,), step + 1.0, requires_grad=True)
                run(table, scales).square().sum().backward()
                found.append(scales.grad)
            torch.testing.assert_close(*found)
            torch.testing.assert_close(*tables)

    pools.get(world).run(job)
