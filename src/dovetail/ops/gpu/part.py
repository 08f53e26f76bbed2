"""What part of a GPU the kernels of a rank have: ranks that share one get equal parts of its multiprocessors.

Kernels of different ranks wait for each other, so all of their programs must have a place to run at once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dovetail.errors import NotSupported
from dovetail.language import Addresses

#: What each rank says of its device: multiprocessors, programs asked for or 0; then its name.
_DEVICE = struct.Struct("<qq")
#: Shared memory of a multiprocessor that the driver takes of each program's.
_RESERVED_BYTES = 1024
#: Under the interpreter tiles are as small as for many programs, so that small problems have several.
_INTERPRETED_CORES = _INTERPRETED_BYTES = 1 << 20


class Part(NamedTuple):
    """Of a rank; under Triton's interpreter there is one program."""

    programs: int  #: of each kernel
    walkers: int  #: programs that every rank's kernels have
    least_cores: int  #: multiprocessors of any rank's kernels, for what ranks must have alike; see `_INTERPRETED_CORES`
    num_sharing: int  #: ranks on this rank's GPU, itself included
    memory_bytes: int  #: shared memory of a program, which has a multiprocessor of its own

    @staticmethod
    def of(addresses: Addresses, rank: int, device: torch.device, asked: int | None, *, interpreted: bool) -> Part:
        """Every rank learns what each has; one that asked for too many programs is refused on all of them."""
        mine, cores, memory_bytes = addresses.device_id, _INTERPRETED_CORES, _INTERPRETED_BYTES
        if not interpreted:
            found = torch.cuda.get_device_properties(device)
            cores = int(found.multi_processor_count)
            memory_bytes = int(found.shared_memory_per_multiprocessor) - _RESERVED_BYTES
        _, notes = addresses.exchange([], _DEVICE.pack(cores, asked or 0) + mine)
        ids = [note[_DEVICE.size :] for note in notes]
        every, wanted = zip(*(_DEVICE.unpack_from(note) for note in notes), strict=True)
        if interpreted and any(many > 1 for many in wanted):
            raise NotSupported(f"{asked} programs: the interpreter runs one after the other, so 1 is the most")
        programs = shares(ids, every, (0,) * len(wanted) if interpreted else wanted)
        least = min(programs)
        has, walkers = (1, 1) if interpreted else (programs[rank], least)
        return Part(has, walkers, least, ids.count(mine), memory_bytes)


def shares(ids: Sequence[bytes], cores: Sequence[int], asked: Sequence[int]) -> list[int]:
    """How many programs each rank's kernels have: equal parts of its GPU, unless it asks for less.

    Args:
        ids: names of the ranks' GPUs.
        cores: their multiprocessors.
        asked: programs, 0 for as many as there are.

    Raises:
        NotSupported: a rank asked for more than its part.
    """
    found = []
    for name, many, wanted in zip(ids, cores, asked, strict=True):
        sharing = ids.count(name)
        most = many // sharing
        if not 1 <= (wanted or most) <= most:
            raise NotSupported(
                f"{wanted or most} programs per kernel: {sharing} ranks share this GPU of {many} multiprocessors, so "
                f"each may have 1 to {most}; with more, a kernel could wait for one that has no place to run"
            )
        found.append(wanted or most)
    return found
