"""gloo as a baseline: what its ranks print."""

from __future__ import annotations

import warnings

import pytest
import torch

from dovetail.bench.baselines import gloo
from dovetail.bench.cases import Case


@pytest.mark.parametrize("call", ["all_gather_into_tensor", "reduce_scatter_tensor"])
def test_a_newer_name_of_torch_is_no_warning_of_each_rank(call: str) -> None:
    """Others of its sort are shown."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        gloo.call_of(Case.of("all_gather", 2, 1024), torch.zeros(256), torch.zeros(512))
        warnings.warn(f"`torch.distributed.{call}` is deprecated. Please use another.", FutureWarning, stacklevel=1)
        warnings.warn("`torch.distributed.all_reduce` is deprecated", FutureWarning, stacklevel=1)
    assert [str(one.message) for one in seen] == ["`torch.distributed.all_reduce` is deprecated"]
