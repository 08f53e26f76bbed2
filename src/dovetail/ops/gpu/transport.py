"""Transports on GPUs, behind the seam of `ops.run`: the kernels of a group and a device, made once.

Every call begins with the exchange of `OpsGroup.agree`, as on the CPU, also while a graph is being captured. Addresses
go along with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dovetail.errors import NotSupported
from dovetail.hw.gpu import tensors
from dovetail.ops import calls
from dovetail.ops.gpu import sliced
from dovetail.ops.gpu.bags import check_table
from dovetail.ops.group import NUM_WORDS, OpsGroup

if TYPE_CHECKING:
    from dovetail.ops.gpu.store import Store


def store_of(g: OpsGroup, device: torch.device) -> Store:
    """The kernels of this group on a device. Made by all ranks at their first call."""
    from dovetail.ops.gpu.store import Store

    key = ("store", device)
    if key not in g.known:
        g.known[key] = Store(g.group, device)
    found: Store = g.known[key]
    return found


_KINDS = "store", "sliced"


def check(g: OpsGroup, device: torch.device) -> None:
    """Raises what an earlier kernel reported: a late peer, a row number out of range."""
    for kind in _KINDS:
        if (found := g.known.get((kind, device))) is not None:
            found.check()


def is_clear(g: OpsGroup, device: torch.device) -> bool:
    """Whether a call whose like was run before need not be looked at: no kernel has reported anything, and no graph is
    being captured."""
    for kind in _KINDS:
        if (found := g.known.get((kind, device))) is not None and not found.is_quiet:
            return False
    store: Store | None = g.known.get(("store", device))
    try:
        if store is None:
            return device.type == "cpu" or not tensors.is_capturing(device.index)
        return not store.is_capturing()
    except RuntimeError:
        return False  # an error of the device: the long way tells it to the other ranks


def check_all(g: OpsGroup, *, synchronize: bool) -> None:
    """The same, for all devices that the group has used."""
    kept = [key[1] for key in g.known if isinstance(key, tuple) and key[0] in _KINDS]
    for device in dict.fromkeys(kept):
        if synchronize and device.type != "cpu":
            torch.cuda.synchronize(device)
        check(g, device)


def refuse(g: OpsGroup, c: calls.Call) -> None:
    """Raises what `store` has against a call, before this rank meets the others: they are told, and the group goes on.

    Raises:
        NotSupported: no Triton for this device; or a graph is captured, and the call can't be part of it.
        ValueError: a table begins where the kernels can't read it.
    """
    try:
        from dovetail.ops.gpu.shared import prepare
    except ImportError as error:
        raise NotSupported(f"transport 'store' on a GPU: {error}") from error
    if isinstance(c, calls.EmbeddingAllToAll):
        for t, table in enumerate(c.weights):
            check_table(t, table)
    store: Store | None = g.known.get(("store", c.device))
    if store is None:
        prepare(g.group, c.device)
    elif isinstance(c, calls.Product):
        store.refuse_captured(c.op, c.x, c.w)
    else:
        store.refuse_capture(c.op)


def _run(
    g: OpsGroup, c: calls.Call, run: Callable[[Store], torch.Tensor], words: Sequence[int] = (),
    splits: Sequence[int] = (),
) -> torch.Tensor:  # fmt: skip
    """Runs a call by the group's kernels. Ranks meet once, as for any call, and say there where peers will write; they
    meet again for addresses in the first call, and where memory is new.

    Args:
        words: what each rank learns from all others, up to two; or `splits`, what it sends and receives.
    """

    def agree(name: int) -> list[tuple[int, ...]]:
        captured = store is not None and store.is_capturing()  # by all ranks, or by none
        wrong_row = 0 if store is None else store.take_wrong_row()
        rows = g.agree(f"{c.text}, captured" if captured else c.text, (name, wrong_row, *words), splits)
        return [(*row[:2], *(row[NUM_WORDS:] if splits else row[2 : 2 + len(words)])) for row in rows]

    store: Store | None = g.known.get(("store", c.device))
    if store is None:
        agree(0)  # before they make anything together
        store = store_of(g, c.device)
    store.meet = agree
    try:
        return run(store)
    finally:
        store.meet = None


def gemm_all_to_all(g: OpsGroup, c: calls.GemmAllToAll) -> torch.Tensor:
    """Tiles go straight to where the peer takes them."""
    return _run(g, c, lambda s: s.gemm_all_to_all(c.x, c.w, c.send, c.receive), splits=(*c.send, *c.receive))


def gemv_all_reduce(g: OpsGroup, c: calls.GemvAllReduce) -> torch.Tensor:
    """Tiles go to their owner, sums to everybody."""
    return _run(g, c, lambda s: s.gemv_all_reduce(c.x, c.w))


def all_gather_matmul(g: OpsGroup, c: calls.AllGatherMatmul) -> torch.Tensor:
    """Rows are read from the peers."""
    return _run(g, c, lambda s: s.all_gather_matmul(c.x, c.w))


def matmul_reduce_scatter(g: OpsGroup, c: calls.MatmulReduceScatter) -> torch.Tensor:
    """Partial tiles go to their owner."""
    return _run(g, c, lambda s: s.matmul_reduce_scatter(c.x, c.w))


def embedding_all_to_all(g: OpsGroup, c: calls.EmbeddingAllToAll) -> torch.Tensor:
    """Bags go straight to the sample's rank. Row numbers are looked at by the kernel: `Store.check` raises."""

    def run(s: Store) -> torch.Tensor:
        return s.embedding_all_to_all(c.weights, c.values, c.offsets, c.batch, c.mode, c.per_sample_weights)

    return _run(g, c, run, words=(len(c.weights),))


STORE: dict[type[calls.Call], Callable[[OpsGroup, Any], torch.Tensor]] = {
    calls.GemmAllToAll: gemm_all_to_all,
    calls.GemvAllReduce: gemv_all_reduce,
    calls.AllGatherMatmul: all_gather_matmul,
    calls.MatmulReduceScatter: matmul_reduce_scatter,
    calls.EmbeddingAllToAll: embedding_all_to_all,
}
DMA: dict[type[calls.Call], Callable[[OpsGroup, Any], torch.Tensor]] = {
    calls.GemmAllToAll: sliced.gemm_all_to_all,
    calls.MatmulReduceScatter: sliced.matmul_reduce_scatter,
    calls.EmbeddingAllToAll: sliced.embedding_all_to_all,
}
DECOMPOSED: dict[type[calls.Call], Callable[[OpsGroup, Any], torch.Tensor]] = {
    calls.GemmAllToAll: partial(sliced.gemm_all_to_all, fused=False),
    calls.MatmulReduceScatter: partial(sliced.matmul_reduce_scatter, fused=False),
}
