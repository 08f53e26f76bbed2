"""Fused operators of one GPU whose peers are in host memory: all forms that the benchmark times, byte by byte.

Its own checks compare every form with new data and spoiled memory, behind the gate too, and raise at a wrong byte.
"""

from __future__ import annotations

import pytest
import torch

from dovetail.bench.fused import gpu
from dovetail.bench.fused.rows import Kind
from dovetail.bench.fused.spec import Op, Shape, Spec, Split
from dovetail.bench.gpu.session import Session
from dovetail.ops.gpu.launch import has_boxes


@pytest.mark.parametrize("split", list(Split))
@pytest.mark.parametrize("op", list(Op))
def test_every_form_moves_the_right_bytes(op: Op, split: Split) -> None:
    shape = Shape(op=op, ratio=1.0, size_bytes=16 << 20, split=split)
    spec = Spec(shapes=(shape,), products=(), seconds=0.02, fewest_rounds=2, most_rounds=2)
    with Session("cuda") as session:
        (row,) = gpu.measure(session, spec).rows
    fused = [cell for cell in row.cells if cell.kind is Kind.DMA]
    assert any(cell.setting.get("cut") for cell in fused)
    assert row.checks > len(row.cells)
    assert row.gated_checks >= len(fused)


def test_products_by_descriptors_are_those_of_torch() -> None:
    """All tiles, whole and in parts; the benchmark holds each against torch.mm and raises if one is wrong."""
    x = torch.empty(8, 64, device="cuda", dtype=torch.bfloat16)
    assert has_boxes(x, x) == (torch.cuda.get_device_capability()[0] in (9, 10))
    products = (2560, 4096, 1024), (1000, 808, 1016)
    spec = Spec(shapes=(), products=products, seconds=0.02, fewest_rounds=2, most_rounds=2)
    with Session("cuda") as session:
        found = gpu.measure(session, spec)
    assert [product.k for product in found.products] == [1024, 1016]
