"""Launches the gather kernel: rows between a GPU and pinned host memory, moved by some of the multiprocessors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import NotSupported

Ints = NDArray[np.int64]
_VECTOR_BYTES, _WORD_BYTES = 16, 8
#: A tile is a whole row up to this: the link needs some 200 KB under way, and each program has one tile.
_MOST_WORDS = 4096
_NUM_WARPS = 8
#: vLLM 0.32 takes as many for pages below 28 KiB.
PROGRAMS = 12


def launch(table: Ints, width: Ints, rows: Ints, stream: int, device: int, programs: int = PROGRAMS) -> list[Any]:
    """Puts strided copies into a raw stream; returns what must stay alive until they have landed.

    Args:
        table: destination, its pitch, source, its pitch: a column for each copy, of `rows` rows of `width` bytes.

    Raises:
        NotSupported: there is no Triton, or an address, pitch or width is not a multiple of 16 bytes.
    """
    try:
        from dovetail.kv.kernels.gather import gather_kernel
    except ImportError:
        raise NotSupported("the path kernel needs Triton: pip install 'dovetail-ml[gpu]'") from None
    if ((table | width) % _VECTOR_BYTES).any():
        raise NotSupported(f"the path kernel moves whole multiples of {_VECTOR_BYTES} bytes; use dma-2d for these rows")
    if not len(width):
        return []
    import torch

    held: list[Any] = []
    shape = width * (int(rows.max()) + 1) + rows
    external: Any = torch.cuda.ExternalStream
    with torch.cuda.device(device), torch.cuda.stream(external(stream)):
        for one in np.unique(shape).tolist():  # a launch for all copies of the same shape
            mine = shape == one
            size, number = int(width[mine][0]), int(rows[mine][0])
            here = torch.from_numpy(np.ascontiguousarray(table[:, mine])).pin_memory()
            there = here.to("cuda", non_blocking=True)
            held += [here, there]
            words = min(1 << (size // _WORD_BYTES - 1).bit_length(), _MOST_WORDS)
            gather_kernel[(programs,)](
                there, there.shape[1], number, size // _VECTOR_BYTES, BLOCK=words, num_warps=_NUM_WARPS
            )
    return held
