"""One rank of a benchmark: ``python -m dovetail.bench.worker FOLDER`` under mpirun, or `launched` by `dovetail.launch`.

Owns what a rank opens: its GPU if it has one, the start line, the process groups of gloo (which also carries what the
ranks tell each other) and NCCL, MPI, Dovetail's group. Nothing is told through stdout: rank 0 writes progress and
result into the folder, and a rank that fails leaves its error there.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from dovetail import env
from dovetail.bench import mpirun
from dovetail.bench.baselines.gloo import Gloo, StagedGloo
from dovetail.bench.baselines.nccl import Nccl, NcclCe
from dovetail.bench.baselines.openmpi import OpenMPI
from dovetail.bench.cases import Case
from dovetail.bench.cell import Cell
from dovetail.bench.contender import Backend
from dovetail.bench.folder import Folder
from dovetail.bench.placement import Placement
from dovetail.bench.spec import CPU, OUT_OF_TIME, Spec
from dovetail.bench.start import StartLine
from dovetail.measure import cores
from dovetail.measure.sizes import format_bytes

if TYPE_CHECKING:
    from dovetail import Group


class Worker:
    """A rank at work; `close` ends what it opened."""

    def __init__(self, folder: Folder, rank: int, spec: Spec, mpi: OpenMPI | None, placement: Placement) -> None:
        self._folder, self._rank, self._spec, self._mpi, self._placement = folder, rank, spec, mpi, placement
        limit_s = env.timeout_s()
        self._start = StartLine(folder.start, rank, spec.ranks, share_cores=spec.share_cores, timeout_s=limit_s)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = FileStore(str(folder.store), spec.ranks)
        limit = timedelta(seconds=limit_s)
        kind = placement.group_backend(spec)
        # This process is bound to a core; gloo's own threads are not, as under torchrun. On this one core they would
        # have to wait for whatever else runs there.
        with cores.on(spec.cpus):
            dist.init_process_group(kind, store=store, rank=rank, world_size=spec.ranks, timeout=limit)
        self._group: Group | None = None
        if spec.variants:
            import dovetail

            self._group = dovetail.init()
        self._baselines = self._open_baselines(kind)

    def run(self) -> dict[str, Any]:
        """Measure everything the spec asks for: rows, notes, and which MPI library was loaded."""
        spec = self._spec
        rows: list[dict[str, Any]] = []
        notes: dict[str, None] = {}
        # Size by size: where time runs out, every collective lacks its largest sizes rather than one all of them.
        cells = [(collective, size) for size in spec.sizes for collective in spec.collectives]
        for done, (collective, size_bytes) in enumerate(cells):
            if self._rank == 0:
                self._folder.report(done, len(cells), f"{collective} {format_bytes(size_bytes)}")
            if spec.limit_s is not None and self._agree(time.monotonic() - spec.began_s)[0] > spec.limit_s:
                notes[f"{OUT_OF_TIME}: {len(cells) - done} of {len(cells)} cases were not measured"] = None
                break
            case = Case.of(collective, spec.ranks, size_bytes, spec.dtype)
            cell = Cell(
                case=case, spec=spec, rank=self._rank, start=self._start, agree=self._agree, placement=self._placement
            )
            new_rows, new_notes = cell.measure(self._wanted(collective))
            rows += new_rows
            notes.update(dict.fromkeys(new_notes))
        rows.sort(key=lambda row: spec.collectives.index(row["collective"]))
        return {"rows": rows, "notes": list(notes), "library": self._mpi.library if self._mpi else None}

    def close(self) -> None:
        """Leave the groups, all ranks together."""
        self._start()
        if self._group is not None:
            self._group.close()
        dist.destroy_process_group()
        self._start.close()

    def _agree(self, value: Any, /) -> list[Any]:
        values: list[Any] = [None] * self._spec.ranks
        dist.all_gather_object(values, value)
        return values

    def _wanted(self, collective: str) -> list[tuple[Backend, str]]:
        """Who takes part: the variants first, then the baselines."""
        wanted: list[tuple[Backend, str]] = []
        if self._spec.variants:
            from dovetail import coll
            from dovetail.bench.ours import Ours

            ours = Ours(self._spec.tensors, self._placement)
            wanted += [(ours, name) for name in self._spec.variants_of(collective, coll.variants(collective))]
        return [*wanted, *((baseline, baseline.name) for baseline in self._baselines)]

    def _open_baselines(self, kind: str) -> list[Backend]:
        """All ranks together, since some have process groups of their own; `kind` is that of the default one."""
        names = self._spec.baselines
        found: list[Backend] = []
        if self._mpi is not None:
            found.append(self._mpi)
        if Gloo.name in names and self._spec.backend == CPU:
            found.append(Gloo())
        elif Gloo.name in names:
            group = None if kind == "gloo" else dist.new_group(backend="gloo")
            found.append(StagedGloo(self._placement, group))
        if Nccl.name in names:
            found.append(Nccl(self._placement))
        if NcclCe.name in names:
            found.append(NcclCe(self._placement, self._spec))
        return found


def work(folder: Folder, rank: int, mpi: OpenMPI | None) -> None:
    """Be `rank` of the benchmark in `folder`."""
    torch.set_num_threads(1)
    try:
        placement = folder.placement
        placement.open(rank)
        worker = Worker(folder, rank, folder.spec, mpi, placement)
        result = worker.run()
        if rank == 0:
            folder.write_result(result)
        worker.close()
    except BaseException as error:
        folder.write_error(rank, error)
        raise


def launched(folder: str) -> None:
    """A rank of `dovetail.launch`, which has made its group; on the CPU bound to a core as mpirun would."""
    import dovetail

    rank, shared = dovetail.init().rank, Folder(Path(folder))
    if shared.placement.binds_cores:
        cores.bind(rank)
    work(shared, rank, None)


def main() -> None:
    """A rank under mpirun."""
    mpirun.die_with_mpirun()
    mpi = OpenMPI()
    try:
        work(Folder(Path(sys.argv[1])), mpi.rank, mpi)
    except BaseException as error:
        sys.stderr.write(f"rank {mpi.rank}: {error!r}\n")
        sys.stderr.flush()
        # The others wait for this rank inside MPI; only an abort ends them.
        mpi.abort()


if __name__ == "__main__":
    main()
