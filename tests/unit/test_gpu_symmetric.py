"""torch's symmetric-memory tensors, with a module in torch's place."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.hw.gpu import symmetric

NAME = "torch.distributed._symmetric_memory"


def test_other_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(group_name="world")
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    assert symmetric.pointers_of(torch.zeros(4), group) is None  # nobody has imported it: no tensor can be one
    monkeypatch.setitem(sys.modules, NAME, SimpleNamespace(is_symm_mem_tensor=lambda t: False))
    assert symmetric.pointers_of(torch.zeros(4), group) is None
    assert symmetric.pointers_of(torch.zeros(4), None) is None
    monkeypatch.setitem(sys.modules, NAME, SimpleNamespace())  # an older torch
    assert symmetric.pointers_of(torch.zeros(4), group) is None


def test_pointers_follow_the_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.zeros(64)
    asked: list[tuple[Any, str]] = []

    def rendezvous(tensor: torch.Tensor, name: str) -> SimpleNamespace:
        asked.append((tensor, name))
        return SimpleNamespace(rank=1, buffer_ptrs=[0x1000, whole.data_ptr(), 0x9000])

    module = SimpleNamespace(is_symm_mem_tensor=lambda t: True, rendezvous=rendezvous)
    monkeypatch.setitem(sys.modules, NAME, module)
    part = whole[16:]
    found = symmetric.pointers_of(part, SimpleNamespace(group_name="tp"))
    assert found == (0x1000 + 64, part.data_ptr(), 0x9000 + 64)
    assert asked == [(part, "tp")]
