"""Checks of tensors and ranks, before anything moves: name, what was given, what is allowed, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch

from dovetail.errors import DovetailError, NotSupported
from dovetail.hw.world import Group


class Alias(IntEnum):
    """Which overlap of output and input a call allows, besides none; `native/tensors.h` has the same numbers."""

    NONE = 0
    INPUT_IN_OUTPUT = 1  #: the input is this rank's part of the output
    OUTPUT_IN_INPUT = 2  #: the output is this rank's part of the input
    SAME = 3


def apart(out: torch.Tensor, inp: torch.Tensor, alias: Alias, rank: int) -> None:
    """Output and input don't overlap, or only as `alias` says."""
    a, b = out.data_ptr(), inp.data_ptr()
    if not out.numel() or not inp.numel() or b >= a + out.nbytes or a >= b + inp.nbytes:
        return
    fits = {
        Alias.NONE: False,
        Alias.INPUT_IN_OUTPUT: b == a + rank * inp.nbytes,
        Alias.OUTPUT_IN_INPUT: a == b + rank * out.nbytes,
        Alias.SAME: a == b,
    }
    if not fits[alias]:
        raise ValueError("output and input overlap: pass separate tensors, or for a call in place the exact part")


def usable(group: Group) -> None:
    """Raises the error that broke the group, or says that it is closed."""
    if group.broken is not None:
        raise group.broken
    if group.native is None and group.world.local:
        raise DovetailError(f"{group} is closed: make a new one")


def tensor(name: str, t: Any) -> torch.Tensor:
    """A dense tensor on the CPU or a GPU."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(t).__name__}")
    if t.is_nested:
        raise NotSupported(f"{name} must be one tensor, not a nested one: pass its .unbind() one by one, or .values()")
    if t.layout is not torch.strided or t.is_quantized:
        raise NotSupported(f"{name} must be a dense tensor, not {t.layout}: call .to_dense()")
    if not t.is_cpu and not t.is_cuda:
        raise NotSupported(f"{name} is on {t.device}; tensors are moved on CPUs and GPUs (CUDA, ROCm): call .cpu()")
    if t.numel() and not t.data_ptr():
        raise NotSupported(
            f"{name} is a {type(t).__name__} without memory of its own: pass the tensor it wraps, or gather the "
            "parameter that it is a part of"
        )
    return t


def backend_of(t: torch.Tensor) -> str:
    """Who moves a tensor: "cpu", "cuda" or "hip"."""
    if t.is_cpu:
        return "cpu"
    return "hip" if torch.version.hip else "cuda"


def one_device(tensors: Sequence[Any]) -> tuple[str, int]:
    """(backend, device index) of tensors that must all be in one place; ("cpu", -1) if there are none."""
    places = {(backend_of(t), -1 if t.device.index is None else int(t.device.index)) for t in tensors}
    if len(places) > 1:
        shown = ", ".join(sorted({str(t.device) for t in tensors}))
        raise ValueError(f"the tensors of a call are on one device, these are on {shown}")
    return places.pop() if places else ("cpu", -1)


def target(name: str, t: Any) -> torch.Tensor:
    """A tensor that is written: it must be contiguous, a copy of it would not be the caller's."""
    if not tensor(name, t).is_contiguous():
        raise ValueError(f"{name} must be contiguous, its strides are {tuple(t.stride())}: pass a contiguous tensor")
    if t.is_neg() or t.is_conj():
        raise ValueError(f"{name} is a lazily negated or conjugated view: call .resolve_neg() or .resolve_conj()")
    return t  # type: ignore[no-any-return]


def source(name: str, t: Any) -> torch.Tensor:
    """A tensor that is read: made contiguous if it is not."""
    return tensor(name, t).contiguous().resolve_conj().resolve_neg()


def same_dtype(a_name: str, a: torch.Tensor, b_name: str, b: torch.Tensor) -> None:
    """Both tensors have one dtype."""
    if a.dtype != b.dtype:
        raise TypeError(f"{a_name} is {a.dtype} and {b_name} is {b.dtype}: they must be of one dtype")


def times(big_name: str, big: torch.Tensor, small_name: str, small: torch.Tensor, size: int) -> None:
    """`big` has `size` times the elements of `small`."""
    if big.numel() != small.numel() * size:
        raise ValueError(
            f"{big_name} has {big.numel()} elements, {small_name} {small.numel()}: "
            f"a group of {size} ranks needs {big_name} of {small.numel() * size}"
        )


def root_rank(group: Group, name: str, global_rank: int | None, group_rank: int | None) -> int:
    """The root's rank in the group, from c10d's two ways to name it (by default rank 0 of the group)."""
    if global_rank is not None and group_rank is not None:
        raise ValueError(f"give {name} or group_{name}, not both")
    if group_rank is not None:
        if not 0 <= group_rank < group.size:
            raise ValueError(f"group_{name} must be in 0..{group.size - 1}, not {group_rank}")
        return group_rank
    if global_rank is None:
        return 0
    if global_rank not in group.ranks:
        raise ValueError(f"{name} must be a rank of the group, one of {list(group.ranks)}, not {global_rank}")
    return group.ranks.index(global_rank)


def tensor_list(name: str, tensors: Any, like: torch.Tensor, size: int, *, written: bool) -> list[torch.Tensor]:
    """One tensor per rank, each as large as `like`."""
    if not isinstance(tensors, Sequence) or len(tensors) != size:
        given = len(tensors) if isinstance(tensors, Sequence) else type(tensors).__name__
        raise ValueError(f"{name} must be a list of {size} tensors on the root, not {given}")
    checked = [target(f"{name}[{i}]", t) if written else source(f"{name}[{i}]", t) for i, t in enumerate(tensors)]
    for i, t in enumerate(checked):
        same_dtype(f"{name}[{i}]", t, "tensor", like)
        if t.numel() != like.numel():
            raise ValueError(f"{name}[{i}] has {t.numel()} elements, tensor {like.numel()}: they must be equal")
    return checked


def split_sizes(name: str, sizes: Any) -> list[Any]:
    """As a list, empty if there are none; a tensor on a GPU is read with a synchronisation."""
    found = sizes.tolist() if hasattr(sizes, "tolist") else sizes
    if found is None:
        return []
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise TypeError(f"{name} must be whole numbers, one for each rank, or a tensor of them, not {sizes!r}")
    return list(found)


def splits(name: str, sizes: list[Any], t: torch.Tensor, world: int) -> list[int]:
    """Lengths in bytes of the pieces of `t` along its first dimension."""
    rows = t.shape[0] if t.dim() else 0
    if not sizes:
        if rows % world:
            raise ValueError(f"{name} has {rows} rows, which {world} ranks can't share equally: give its split sizes")
        sizes = [rows // world] * world
    if len(sizes) != world or any(not isinstance(n, int) or n < 0 for n in sizes):
        raise ValueError(f"{name}'s split sizes must be {world} whole numbers, 0 or more, not {list(sizes)}")
    if sum(sizes) != rows:
        raise ValueError(f"{name}'s split sizes {list(sizes)} sum to {sum(sizes)}, it has {rows} rows")
    row_bytes = t.nbytes // rows if rows else 0
    return [n * row_bytes for n in sizes]
