"""What a replay found: the time, where it went, and, on request, when each engine, link and thread was busy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """A's four phases; every nanosecond of the critical path is in one of them."""

    CONTROL = "control"  #: a host thread builds and enqueues commands
    SCHEDULE = "schedule"  #: from the doorbell, or the gate, to the engine's start
    COPY = "copy"  #: bytes move
    SYNC = "sync"  #: a completion travels, and is noticed


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Somebody was busy from `begin_ns` to `end_ns`."""

    track: str  #: such as ``rank 0 engine 3``, ``link 0 -> 1``, ``host``
    name: str
    begin_ns: int
    end_ns: int
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A plan's time on a machine. Simulated."""

    plan: str
    machine: str
    time_ns: int
    phases_ns: dict[Phase, int]  #: of the critical path; they add up to `time_ns`
    limit_ns: int  #: what the links alone would need for these bytes
    spans: tuple[Span, ...] = ()
    simulated: bool = True

    @property
    def time_us(self) -> float:
        """The time in microseconds."""
        return self.time_ns / 1000

    def shares(self) -> dict[Phase, float]:
        """Each phase's share of the time."""
        return {phase: ns / self.time_ns if self.time_ns else 0.0 for phase, ns in self.phases_ns.items()}


def chrome_trace(result: Result) -> dict[str, Any]:
    """The spans in the form that chrome://tracing and Perfetto read: a process per rank, the host or the links."""
    return {
        "displayTimeUnit": "ns",
        "otherData": {"plan": result.plan, "machine": result.machine, "simulated": True, "time_ns": result.time_ns},
        "traceEvents": list(_events(result)),
    }


def _events(result: Result) -> Iterator[dict[str, Any]]:
    threads: dict[str, tuple[int, int]] = {}
    groups: dict[str, int] = {}
    placed = list(_placed(result.spans))
    for _, track in placed:
        if track in threads:
            continue
        words = track.split()
        group = " ".join(words[:2]) if words[0] == "rank" else {"link": "links"}.get(words[0], words[0])
        if group not in groups:
            groups[group] = len(groups) + 1
            args = {"name": f"{group} (simulated, {result.machine})"}
            yield {"ph": "M", "name": "process_name", "pid": groups[group], "tid": 0, "args": args}
        threads[track] = (groups[group], len(threads) + 1)
        pid, tid = threads[track]
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}
    for span, track in placed:
        pid, tid = threads[track]
        yield {
            "ph": "X",
            "name": span.name,
            "pid": pid,
            "tid": tid,
            "ts": span.begin_ns / 1000,
            "dur": (span.end_ns - span.begin_ns) / 1000,
            "args": {"bytes": span.size_bytes} if span.size_bytes else {},
        }


def _placed(spans: Sequence[Span]) -> Iterator[tuple[Span, str]]:
    """Each span with a track of its own kind that is free: what shares a link at one time stands side by side."""
    ends: dict[str, list[int]] = {}
    for span in sorted(spans, key=lambda s: (s.begin_ns, s.track)):
        lanes = ends.setdefault(span.track, [])
        lane = next((n for n, end in enumerate(lanes) if end <= span.begin_ns), len(lanes))
        lanes[lane : lane + 1] = [span.end_ns]
        yield span, f"{span.track} ({lane + 1})" if lane else span.track
