"""Calls of a CPU process group with GPU tensors: whichever way one waits, the results come back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.coll.baseline import Staged


@pytest.mark.parametrize(
    "wait", [lambda w: w.wait(), lambda w: w.synchronize(), lambda w: w.result(), lambda w: w.is_completed()]
)
def test_results_come_back(wait: Callable[[Any], Any]) -> None:
    inner = SimpleNamespace(
        wait=lambda *_: True, is_completed=lambda: True, synchronize=lambda: None, result=lambda: None
    )
    gpu, host = torch.zeros(4), torch.arange(4.0)
    work = Staged(inner, [(gpu, host)])
    wait(work)
    assert torch.equal(gpu, host)
    assert work.result()[0] is gpu
