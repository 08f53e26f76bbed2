"""Open MPI, through mpi4py with contiguous NumPy buffers.

Called in its strongest form: counts and MPI types are given, so that mpi4py does not look them up in every call (0.3 us
of 3.3 at 1 KB), and all_reduce is in place, as ours is (2.7 us instead of 3.3). Initialised as mpi4py does by itself;
a lower level of thread support was not faster. Measured with Open MPI 4.1.4 and mpi4py 4.1.2 on a 2-core Xeon.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from dovetail.bench.cases import ROOT, Case
from dovetail.bench.contender import Contender
from dovetail.errors import NotSupported

_TYPES = {
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "int8": "INT8_T",
    "uint8": "UINT8_T",
    "int32": "INT32_T",
    "int64": "INT64_T",
}


class OpenMPI:
    """The world of this process, made by ``mpirun``. Owns MPI: the first one made initialises it."""

    name = "openmpi"

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._comm: Any = MPI.COMM_WORLD
        self.rank = int(self._comm.Get_rank())
        self.size = int(self._comm.Get_size())

    @property
    def library(self) -> str:
        """What the loaded library calls itself, such as ``Open MPI v4.1.4``."""
        return str(self._mpi.Get_library_version()).split(",", 1)[0].strip()

    def abort(self) -> None:
        """End all ranks now."""
        self._comm.Abort(1)

    def bind(self, case: Case, requested: str) -> Contender:
        """Allocate and make ready; `NotSupported` for a sum of a type that MPI has not."""
        source = _array(case.num_elements, case.torch_dtype)
        target = source if case.in_place else _array(case.num_output, case.torch_dtype)
        call = self._call(case, source, target)
        inp = torch.from_numpy(source).view(case.torch_dtype)
        out = inp if case.in_place else torch.from_numpy(target).view(case.torch_dtype)
        return Contender(backend=self.name, requested=requested, variant=self.name, inp=inp, out=out, call=call)

    def _call(self, case: Case, inp: np.ndarray, out: np.ndarray) -> Callable[[], object]:
        kind, per_element = self._type(case)
        given, share = case.num_elements * per_element, case.num_elements * per_element // case.ranks
        comm, in_place = self._comm, self._mpi.IN_PLACE
        calls: dict[str, Callable[[], Callable[[], object]]] = {
            "all_gather": lambda: partial(comm.Allgather, (inp, given, kind), (out, given, kind)),
            "all_to_all": lambda: partial(comm.Alltoall, (inp, share, kind), (out, share, kind)),
            "all_reduce": lambda: partial(comm.Allreduce, in_place, (inp, given, kind)),
            "reduce_scatter": lambda: partial(comm.Reduce_scatter_block, (inp, share, kind), (out, share, kind)),
            "broadcast": lambda: partial(comm.Bcast, (inp, given, kind), ROOT),
        }
        return calls[case.collective]()

    def _type(self, case: Case) -> tuple[Any, int]:
        """The MPI type, and how many of it make an element: 16-bit floats are moved as bytes."""
        if case.dtype in _TYPES:
            return getattr(self._mpi, _TYPES[case.dtype]), 1
        if case.reduces:
            raise NotSupported(f"MPI has no type for {case.dtype}, so Open MPI cannot sum it")
        return self._mpi.BYTE, case.torch_dtype.itemsize


def _array(num_elements: int, dtype: torch.dtype) -> np.ndarray:
    """A contiguous NumPy buffer that torch can look at as `dtype`; NumPy has no bfloat16."""
    like = {torch.bfloat16: torch.int16}.get(dtype, dtype)
    kind = torch.empty(0, dtype=like).numpy().dtype
    return np.empty(num_elements, dtype=kind)
