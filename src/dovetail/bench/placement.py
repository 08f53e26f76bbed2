"""Where the tensors of a benchmark's ranks are, and when a call on them is over: what the harness knows of a device.

The runner makes a `Placement` and looks at the machine through it; a copy of it goes to every rank, which opens it and
makes tensors with it. `of` names those there are; a test has one of its own, for a driver without hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from dovetail.bench.gpu.sharing import Site
from dovetail.bench.spec import CPU, CUDA, Spec
from dovetail.errors import NotSupported


class Placement(Protocol):
    """Where tensors are. Pickled between `survey` and `open`."""

    @property
    def backend(self) -> str:
        """What rows of ours have as their backend: ``cpu`` or ``cuda``."""

    @property
    def device(self) -> Any:
        """This rank's device as `dovetail.explain` takes it; None is the CPU. Known once it is open."""

    @property
    def binds_cores(self) -> bool:
        """Whether a rank is kept on one core, as mpirun would."""

    def survey(self, ranks: int) -> Site:
        """In the runner, before there are ranks: what they will find; `NotSupported` if they could not run."""

    def facts(self) -> dict[str, Any] | None:
        """In the runner, after the ranks: the device for the record."""

    def open(self, rank: int) -> None:
        """In a rank, before anything else: take the device."""

    def group_backend(self, spec: Spec) -> str:
        """What a rank's default process group is made of, in c10d's words."""

    def empty(self, num_elements: int, dtype: torch.dtype, *, symmetric: bool) -> torch.Tensor:
        """A tensor that is not initialised."""

    def until_done(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call, returning when its result is there."""


class Cpu:
    """Host memory: a blocking call is done when it returns."""

    backend = CPU
    device = None
    binds_cores = True

    def survey(self, ranks: int) -> Site:
        """Nothing to see."""
        return Site()

    def facts(self) -> dict[str, Any] | None:
        """None: the record has the machine."""
        return None

    def open(self, rank: int) -> None:
        """Nothing to take."""

    def group_backend(self, spec: Spec) -> str:
        """gloo."""
        return "gloo"

    def empty(self, num_elements: int, dtype: torch.dtype, *, symmetric: bool) -> torch.Tensor:
        """On the heap that all ranks map, or anywhere."""
        if not symmetric:
            return torch.empty(num_elements, dtype=dtype)
        import dovetail

        tensor: torch.Tensor = dovetail.empty(num_elements, dtype=dtype)
        return tensor

    def until_done(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call itself: nothing may be added to what is timed."""
        return call


class Cuda:
    """Each rank's GPU; ranks beyond the GPUs share them in turn.

    A call is over when the current stream has come to its end: there the caller's next kernel would run. The host waits
    for that with the stream's `synchronize`.
    """

    backend = CUDA
    binds_cores = False

    def __init__(self, *, force: bool = False) -> None:
        self._force = force
        self.device: Any = None

    def survey(self, ranks: int) -> Site:
        """Count the GPUs, and see that nobody else uses those of the ranks."""
        from dovetail.bench.gpu import sharing

        cuda: Any = torch.cuda
        if not cuda.is_available():
            raise NotSupported(f"torch {torch.__version__} finds no GPU; `dovetail doctor` says why")
        return sharing.survey(ranks, force=self._force)

    def facts(self) -> dict[str, Any] | None:
        """The first GPU."""
        from dovetail.bench.gpu import sharing

        return sharing.facts()

    def open(self, rank: int) -> None:
        """Make this rank's GPU the current one: its own, or one that it shares."""
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)

    def group_backend(self, spec: Spec) -> str:
        """What a user would have: NCCL for GPU tensors where every rank has a GPU, otherwise gloo alone."""
        has_nccl = torch.distributed.is_nccl_available() and not spec.shares_gpus
        return "cpu:gloo,cuda:nccl" if has_nccl else "gloo"

    def empty(self, num_elements: int, dtype: torch.dtype, *, symmetric: bool) -> torch.Tensor:
        """On the GPU's heap that all ranks map, or torch's own memory."""
        if not symmetric:
            return torch.empty(num_elements, dtype=dtype, device=self.device)
        import dovetail

        tensor: torch.Tensor = dovetail.empty(num_elements, dtype=dtype, device=self.device)
        return tensor

    def until_done(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call, and then the host waits for the current stream."""
        wait: Callable[[], None] = torch.cuda.current_stream(self.device).synchronize

        def whole() -> None:
            call()
            wait()

        return whole


def of(backend: str, *, force: bool = False) -> Placement:
    """The placement of a backend; `force` measures although others use the GPU."""
    return Cuda(force=force) if backend == CUDA else Cpu()
