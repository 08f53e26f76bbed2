"""Machines for tests of the simulator: small, with numbers that can be added in one's head."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dovetail.sim.machine import (
    Compute,
    Engine,
    Host,
    Link,
    Machine,
    Memory,
    Steps,
    Threads,
    Wiring,
)

DATA = Path(__file__).parents[1] / "data"


def machine(**changes: Any) -> Machine:
    """One host thread, a link of 1 GB/s (a byte per nanosecond) per pair; changes by section: host={"submit_ns": 5}."""
    sections: dict[str, Any] = {
        "host": Host(
            threads=Threads.ONE, submit_ns=100, command_ns=10, switch_ns=7, trigger_ns=3, observe_ns=20
        ),
        "engine": Engine(
            count=14, steps=tuple(Steps), schedule_ns=1000, poll_ns=500, command_ns=50, start_ns=300, signal_ns=200,
            copy_gbps=1.0, paired_gbps=0.8,
        ),
        "link": Link(wiring=Wiring.FULLY_CONNECTED, bandwidth_gbps=1.0, latency_ns=40),
        "memory": Memory(bandwidth_gbps=1000.0),
        "compute": Compute(start_ns=600, reduce_gbps=90.0),
    }  # fmt: skip
    for name, section in sections.items():
        sections[name] = dataclasses.replace(section, **changes.pop(name, {}))
    return Machine(**{"name": "test", "title": "a test machine", "ranks": 8, **sections, **changes})
