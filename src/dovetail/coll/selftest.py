"""The self-test: every collective in every variant on ranks of this machine, compared bit for bit with plain torch.

`auto` takes our path on a GPU only where this has passed (choose.untested). Owns the ranks, the time limit and the
verdict; what is tried is in `cases.py`. A case that fails does not end the others unless it broke the group.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dovetail import env
from dovetail.coll import cases as trials
from dovetail.coll import session, spawn
from dovetail.coll.cases import Case, Maker, Tensors
from dovetail.errors import DovetailError, MismatchError, NotSupported, PeerError, Timeout
from dovetail.measure import evidence

LIMIT_S = 300.0
#: A rank that is silent this long has failed; the first call of a reduction compiles a kernel meanwhile.
_SILENT_S = 60.0
_MOST_RANKS = 8
_POLL_S = 0.2
#: How many failures the profile keeps.
_MOST_KEPT = 20
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong in a case on a rank."""

    case: Case
    rank: int
    text: str

    def __str__(self) -> str:
        return f"{self.case}; rank {self.rank}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a self-test found."""

    backend: str
    ranks: int
    seed: int
    cases: Sequence[Case]
    failures: Sequence[Failure] = ()
    ended: str = ""  #: why it ended before all cases had run; empty if it did not
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if every case ran and none failed."""
        return not self.failures and not self.ended and bool(self.cases)

    def rows(self) -> list[dict[str, Any]]:
        """One per collective and variant, for a record."""
        pairs = dict.fromkeys((case.collective, case.variant) for case in self.cases)
        return [self._row(*pair) for pair in pairs]

    def _row(self, collective: str, variant: str) -> dict[str, Any]:
        own = [str(f) for f in self.failures if (f.case.collective, f.case.variant) == (collective, variant)]
        failed = {f.case for f in self.failures if (f.case.collective, f.case.variant) == (collective, variant)}
        tried = sum((case.collective, case.variant) == (collective, variant) for case in self.cases)
        return {
            "collective": collective, "variant": variant, "backend": self.backend, "ranks": self.ranks,
            "seed": self.seed, "cases": tried, "failed": len(failed), "failures": own, "ended": self.ended,
        }  # fmt: skip

    def entry(self, device: str, driver: int, num_gpus: int = 1) -> dict[str, Any]:
        """What the profile keeps of it. `num_gpus`: how many the ranks could see."""
        counts: dict[str, dict[str, int]] = {}
        for row in self.rows():
            into = counts.setdefault(row["collective"], {"cases": 0, "failed": 0})
            into["cases"] += row["cases"]
            into["failed"] += row["failed"]
        texts = [*([self.ended] if self.ended else []), *map(str, self.failures)]
        facts = {
            "passed": self.passed, "ranks": self.ranks, "gpus": min(self.ranks, num_gpus), "seed": self.seed,
            "collectives": counts, "failures": texts[:_MOST_KEPT],
        }  # fmt: skip
        return evidence.stamped(device, driver, facts)


def default_ranks(num_gpus: int) -> int:
    """Two ranks share a single GPU; otherwise one per GPU, at most 8."""
    return 2 if num_gpus < 2 else min(num_gpus, _MOST_RANKS)


def run(
    backend: str,
    ranks: int,
    *,
    limit_s: float = LIMIT_S,
    progress: Progress | None = None,
    make: Callable[[], Maker] | None = None,
    cases: Sequence[Case] | None = None,
    seed: int | None = None,
) -> Outcome:
    """Runs the cases on new ranks and says what failed. Never raises for what a rank does.

    Args:
        backend: "cpu", "cuda" or "hip".
        make: called on every rank; makes its tensors. By default they are torch's own on `backend`.
        cases: by default all of `cases.table`.
        seed: of the data; a new one each time by default.
    """
    if not 2 <= ranks <= spawn.MOST_RANKS:
        raise ValueError(f"the self-test takes 2 to {spawn.MOST_RANKS} ranks, not {ranks}")
    if not limit_s > 0:
        raise ValueError(f"limit_s must be seconds above 0, not {limit_s:g}")
    if backend not in ("cpu", "cuda", "hip"):
        raise ValueError(f"there are the backends cpu, cuda and hip, not {backend!r}")
    chosen = list(trials.table(ranks) if cases is None else cases)
    number = secrets.randbelow(1 << 32) if seed is None else seed
    maker = make or _Default("cpu" if backend == "cpu" else "cuda")
    begin = time.monotonic()
    found: list[Failure] = []
    ended = ""
    with tempfile.TemporaryDirectory(prefix="dovetail-selftest-") as folder, _Follow(folder, chosen, progress) as seen:
        try:
            silent_s = min(_SILENT_S, env.timeout_s())
            variables = {"DOVETAIL_TIMEOUT": str(silent_s)}
            parts = spawn.launch(_serve, ranks, (maker, chosen, number, folder), timeout=limit_s, env=variables)
            found, ended = _judged(chosen, parts)
        except Timeout:
            ended = f"not done after {limit_s:g} s, at {seen.where()}"
        except (DovetailError, OSError, RuntimeError) as error:
            ended = f"{type(error).__name__}: {error}, at {seen.where()}"
    return Outcome(
        backend=backend, ranks=ranks, seed=number, cases=chosen, failures=found, ended=ended,
        seconds=time.monotonic() - begin,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Default:
    """Tensors of torch's own, made on the rank."""

    device: str

    def __call__(self) -> Maker:
        return Tensors(self.device)


@dataclass(frozen=True, slots=True)
class _End:
    """The case that a rank stopped at."""

    index: int
    text: str
    consequence: bool  #: a peer was the cause


@dataclass(slots=True)
class _Part:
    """What one rank saw."""

    rank: int
    failed: list[tuple[int, str]] = field(default_factory=list)  #: case and what was wrong
    broken: _End | None = None


def _serve(make: Callable[[], Maker], chosen: Sequence[Case], seed: int, folder: str) -> _Part:
    """On a rank: all cases, in order."""
    world = session.world().group
    part = _Part(world.rank)
    index = 0
    torch.set_num_threads(1)  # ranks share the cores
    try:
        maker = make()
        some = range(1, world.size) if world.size > 2 else (1, 0)
        few = session.new_group(some) if world.rank in some else None
        for index, case in enumerate(chosen):
            if world.rank == 0:
                Path(folder, "at").write_text(str(index))
            group = few if case.part else world
            if group is None:
                continue
            try:
                wrong = trials.check(case, group, maker, (seed, index))
            except (NotSupported, MismatchError, ValueError, TypeError) as error:  # raised before anything moved
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                part.failed.append((index, wrong))
    except Exception as error:
        part.broken = _End(index, f"{type(error).__name__}: {error}", isinstance(error, PeerError | Timeout))
    return part


def _judged(chosen: Sequence[Case], parts: Sequence[_Part]) -> tuple[list[Failure], str]:
    """All failures in the order of the cases; and what ended the run early, the cause before its consequences."""
    found = [(index, part.rank, text) for part in parts for index, text in part.failed]
    failures = [Failure(case=chosen[index], rank=rank, text=text) for index, rank, text in sorted(found)]
    broken = [
        (part.broken.consequence, part.broken.index, part.rank, part.broken.text) for part in parts if part.broken
    ]
    if not broken:
        return failures, ""
    _, index, rank, text = min(broken)
    where = chosen[index] if chosen else "the start"
    return failures, f"rank {rank} stopped at {where}: {text}"


class _Follow(contextlib.AbstractContextManager["_Follow"]):
    """Tells how far rank 0 is, from a thread."""

    def __init__(self, folder: str, chosen: Sequence[Case], tell: Progress | None) -> None:
        self._file, self._chosen, self._tell = Path(folder, "at"), chosen, tell
        self._end = threading.Event()
        self._last = -1
        self._thread = threading.Thread(target=self._watch, name="dovetail self-test", daemon=True)
        self._thread.start()

    def where(self) -> str:
        """The case that rank 0 is at."""
        self._look()
        if self._last < 0:
            return "the start"
        return f"case {self._last + 1} of {len(self._chosen)}, {self._chosen[self._last]}"

    def _look(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # not there yet, or just being written
            self._last = int(self._file.read_text())

    def _watch(self) -> None:
        while not self._end.wait(_POLL_S):
            self._look()
            if self._tell is not None and self._last >= 0:
                self._tell(self._last, len(self._chosen), str(self._chosen[self._last]))

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
