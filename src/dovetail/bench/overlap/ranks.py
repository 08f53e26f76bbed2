"""The bench on a CPU: starts the ranks, follows them, and makes one sample of what each has measured.

Owns the processes and their folder until the end.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail import env
from dovetail.bench import start
from dovetail.bench.folder import Folder
from dovetail.bench.overlap.spec import Progress, Spec
from dovetail.measure import cores
from dovetail.overlap.tables import Tables

_POLL_S = 0.05


def on_ranks(ranks: int, work: Callable[..., Any], args: tuple[Any, ...], progress: Progress | None) -> list[Any]:
    """Calls `work(site, report, *args)` in `ranks` processes; `report` is rank 0's. Returns what each returned."""
    from dovetail.coll import launch

    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as name:
        folder = Folder(Path(name))
        start.make(folder.start, ranks)
        over = threading.Event()

        def follow() -> None:
            heard = 0
            while not over.wait(_POLL_S):
                if progress and len(reports := folder.progress()) > heard:
                    heard = len(reports)
                    progress(*reports[-1])

        follower = threading.Thread(target=follow, name="dovetail-bench-progress", daemon=True)
        follower.start()
        try:
            return launch(_rank, ranks=ranks, args=(name, ranks, work, args))
        finally:
            over.set()
            follower.join()


def _rank(folder: str, ranks: int, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a rank does; ranks are not bound to cores, which strategies share out."""
    import dovetail
    from dovetail.bench.overlap.cpu import CpuSite

    rank, shared = dovetail.init().rank, Folder(Path(folder))
    line = start.StartLine(
        shared.start, rank, ranks, share_cores=ranks > cores.usable(), timeout_s=env.timeout_s()
    )  # fmt: skip
    report = shared.report if rank == 0 else _silent
    with CpuSite(rank, ranks, line) as site:
        found = work(site, report, *args)
        dovetail.barrier()
    line.close()
    return found


def _silent(_done: int, _total: int, _where: str) -> None:
    """Another rank reports."""


def measure(spec: Spec, tables: Tables | None, progress: Progress | None) -> tuple[Any, ...]:
    """What `measure.measure` returns, of the slowest rank."""
    from dovetail.bench.overlap.measure import measure as one
    from dovetail.bench.overlap.sample import slowest

    every = on_ranks(spec.ranks, one, (spec, tables), progress)
    samples = [slowest(each) for each in zip(*(found[0] for found in every), strict=True)]
    return samples, every[0][1], every[0][2]
