"""Launches the gather kernel: rows between a GPU and pinned host memory, moved by some of the multiprocessors."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import NotSupported

Ints = NDArray[np.int64]
_VECTOR_BYTES = 16
_BLOCK, _NUM_WARPS = 1024, 8
#: vLLM 0.32 takes as many for pages below 28 KiB.
PROGRAMS = 12


def launch(dst: Ints, src: Ints, length: Ints, stream: int, device: int, programs: int = PROGRAMS) -> list[Any]:
    """Puts the copies into a raw stream; returns what must stay alive until they have landed.

    Raises:
        NotSupported: there is no Triton, or an address or length is not a multiple of 16 bytes.
    """
    if importlib.util.find_spec("triton") is None:
        raise NotSupported("the path kernel needs Triton: pip install 'dovetail-ml[gpu]'")
    if ((dst | src | length) % _VECTOR_BYTES).any():
        raise NotSupported(f"the path kernel moves whole multiples of {_VECTOR_BYTES} bytes; use dma-2d for these rows")
    import torch

    from dovetail.kv.kernels.gather import gather_kernel

    held: list[Any] = []
    external: Any = torch.cuda.ExternalStream
    with torch.cuda.device(device), torch.cuda.stream(external(stream)):
        for size in np.unique(length).tolist():
            mine = length == size
            tables = torch.from_numpy(np.stack([dst[mine], src[mine]])).pin_memory()
            there = tables.to("cuda", non_blocking=True)
            held += [tables, there]
            gather_kernel[(programs,)](
                there[0], there[1], there.shape[1], size // _VECTOR_BYTES, BLOCK=_BLOCK, num_warps=_NUM_WARPS
            )
    return held
