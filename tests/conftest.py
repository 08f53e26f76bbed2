"""Marks every test with its tier, the folder it lies in, decides what a missing tool means, and lets Ctrl-C through."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail import env

TIERS = ("unit", "ranks", "interp", "gpu", "browser", "vllm")


def pytest_configure() -> None:
    """Tests go by the shipped profile, not by what was tuned here. And a shell ignores SIGINT in what it runs in the
    background, as would all that tests start and interrupt."""
    os.environ.setdefault("DOVETAIL_PROFILE", str(Path(__file__).parent / "no profile.json"))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        tier = item.path.relative_to(here).parts[0]
        if tier in TIERS:
            item.add_marker(tier)


@pytest.fixture(scope="session")
def need() -> Callable[[str, object], None]:
    """``need("openmpi", openmpi.find())``: skip when the tool is missing, fail when DOVETAIL_REQUIRE names it."""

    def check(tool: str, found: object) -> None:
        if not found:
            reason = f"{tool} is missing"
            pytest.fail(reason) if tool in env.require() else pytest.skip(reason)

    return check
