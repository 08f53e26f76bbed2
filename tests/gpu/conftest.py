"""The tier needs a GPU that torch can use: skipped where there is none, failed where DOVETAIL_REQUIRE names `gpu`."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(scope="session", autouse=True)
def gpu(need: Callable[[str, object], None]) -> None:
    """Every test here asks for it."""
    import torch

    need("gpu", torch.cuda.is_available())
