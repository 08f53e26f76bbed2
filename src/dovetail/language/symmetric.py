"""Memory that every rank of a group can reach, as the addresses that kernels take.

Owns the exchange of addresses: a rank names its memory (an offset in shared memory, an IPC handle of a GPU segment),
the others find where that lies in their own process. Nothing collective happens in a destructor.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import DovetailError, HardwareError, MismatchError, NotSupported
from dovetail.hw.meeting import Meeting
from dovetail.hw.world import Group, World

if TYPE_CHECKING:
    import torch

    from dovetail.hw.gpu.watchdog import Watchdog
    from dovetail.hw.gpu.world import GpuWorld, Leaves

#: Most tensors of one exchange, and bytes that may go along with them.
MOST_TENSORS = 4
NOTE_BYTES = 2048
#: how, size of the handle, offset, size of the memory; then the handle
_NAME = struct.Struct("<iiqq")
_HANDLE_BYTES = 72
_NAME_BYTES = _NAME.size + _HANDLE_BYTES
#: Memory of no bytes, and memory of the host's shared heap; other numbers are those of `hw.gpu.world`.
_EMPTY, _SHARED = -1, -2
#: A tensor in one word: the number of its memory and the offset there; or that it has no bytes.
_OFFSET_BITS, _NO_BYTES = 48, -1


def indexed(device: torch.device | str) -> torch.device:
    """A device with its number: "cuda" is torch's current one."""
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)


def gpu_world(world: World, index: int) -> GpuWorld:
    """The GPU side of a world, of the kind that torch is built for."""
    import torch

    from dovetail.hw.gpu.world import world_of

    return world_of(world, "cuda" if torch.version.hip is None else "hip", index)


class Addresses:
    """Tells all members of a group where each of them has its tensors. All members make one, with equal devices' kinds.

    Use `Addresses.of(group, device)`: a group has one per device.
    """

    def __init__(self, group: Group, device: torch.device | str) -> None:
        device = indexed(device)
        self.group, self.device = group, device
        self._gpu = gpu_world(group.world, device.index) if device.type != "cpu" else None
        self._meeting = Meeting(
            group, MOST_TENSORS * _NAME_BYTES + NOTE_BYTES, f"addresses on {device.type}",
            purpose="to exchange addresses of tensors",
        )  # fmt: skip
        # Memory that was in an exchange, by how it was named, for each rank: its number, and where it begins here.
        self._numbers: list[dict[tuple[int, bytes], int]] = [{} for _ in range(group.size)]
        self._bases: list[list[int]] = [[] for _ in range(group.size)]
        self._watchdog: Watchdog | None = None  # where there is no GPU, whose own is used

    @property
    def watchdog(self) -> Watchdog:
        """Looks, in a thread of its own, at kernels of this rank that may wait for others."""
        if self._gpu is not None:
            return self._gpu.device.watchdog
        if self._watchdog is None:
            from dovetail.hw.gpu.watchdog import Watchdog

            self._watchdog = Watchdog(lambda: None)
        return self._watchdog

    def leaves(self, kernels: Leaves) -> None:
        """Tells whose kernels a process gives up that ends by an error."""
        if self._gpu is not None:
            self._gpu.groups.add(kernels)

    @property
    def device_id(self) -> bytes:
        """Names the device on this host: ranks with equal ones share it."""
        if self._gpu is None:
            return b"cpu"
        device = self._gpu.device
        return device.driver.device_uuid(device.index)

    @staticmethod
    def of(group: Group, device: torch.device | str) -> Addresses:
        """That of a group and device; made by all members in their first call."""
        device = indexed(device)
        for kept in group.keep:
            if isinstance(kept, Addresses) and kept.device == device:
                return kept
        made = Addresses(group, device)
        group.keep.append(made)
        return made

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that peers can reach, not initialised; made without them."""
        if self._gpu is None:
            return self.group.world.empty(shape, dtype)
        found: torch.Tensor = self._gpu.heap.empty(shape, dtype)
        return found

    def reaches(self, tensor: torch.Tensor) -> bool:
        """Whether peers can reach this tensor as it is."""
        return not tensor.nbytes or (tensor.is_contiguous() and self._name(tensor)[0] is not None)

    def exchange(self, tensors: Sequence[torch.Tensor], note: bytes = b"") -> tuple[NDArray[np.int64], list[bytes]]:
        """(addresses [rank, tensor] in this process, everybody's note). Blocks until all members are here.

        The addresses are good as long as a rank keeps its tensor. An empty tensor has address 0.

        Raises:
            MismatchError: ranks gave different numbers of tensors.
            NotSupported: a tensor lies where peers can't reach it.
            PeerError, Timeout: a rank is gone or silent; the group is broken.
        """
        if len(tensors) > MOST_TENSORS or len(note) > NOTE_BYTES - 8:
            most = f"at most {MOST_TENSORS} tensors and {NOTE_BYTES - 8} bytes"
            raise ValueError(f"{most}, not {len(tensors)} and {len(note)}")
        mine = struct.pack("<ii", len(tensors), len(note)) + note.ljust(NOTE_BYTES - 8, b"\0")
        for tensor in tensors:
            mine += self._packed(tensor)
        everybody = self._meeting.exchange(mine)
        found = np.zeros((self.group.size, len(tensors)), np.int64)
        notes = []
        for rank in range(self.group.size):
            row = everybody[rank * self._meeting.size_bytes :][: self._meeting.size_bytes]
            many, length = struct.unpack_from("<ii", row)
            if many != len(tensors):
                calls = {self.group.rank: f"with {len(tensors)} tensors", rank: f"with {many} tensors"}
                raise MismatchError("ranks exchange addresses of different calls", calls=calls)
            notes.append(row[8 : 8 + length])
            for k, own in enumerate(tensors):
                name = row[NOTE_BYTES + k * _NAME_BYTES :][:_NAME_BYTES]
                found[rank, k] = own.data_ptr() if rank == self.group.rank else self._address(rank, name)
                self._learn(rank, name, int(found[rank, k]))
        return found, notes

    def short(self, tensor: torch.Tensor) -> int:
        """A tensor in one word that `resolved` understands on every member; 0 if its memory was in no exchange yet."""
        if not tensor.nbytes:
            return _NO_BYTES
        how, handle, offset = self._name(tensor)
        number = self._numbers[self.group.rank].get((how, handle), 0) if how is not None else 0
        return number << _OFFSET_BITS | offset if number else 0

    def resolved(self, words: Sequence[int]) -> NDArray[np.int64] | None:
        """The addresses in this process of what each rank named by `short`; None if one of them is 0."""
        if 0 in words:
            return None
        found = np.zeros(len(words), np.int64)
        for rank, word in enumerate(words):
            if word != _NO_BYTES:
                found[rank] = self._bases[rank][(word >> _OFFSET_BITS) - 1] + (word & (1 << _OFFSET_BITS) - 1)
        return found

    def _learn(self, rank: int, name: bytes, address: int) -> None:
        """Numbers memory as it comes, on every member alike."""
        how, length, offset, _ = (int(n) for n in _NAME.unpack_from(name))
        key = how, name[_NAME.size :][:length]
        if how != _EMPTY and key not in self._numbers[rank]:
            self._bases[rank].append(address - offset)
            self._numbers[rank][key] = len(self._bases[rank])

    def table(self, addresses: NDArray[np.int64]) -> torch.Tensor:
        """Addresses as a kernel takes them, on the device."""
        import torch

        made = torch.from_numpy(np.ascontiguousarray(addresses))
        return made.clone() if self._gpu is None else made.to(self.device)

    def barrier(self) -> None:
        """Returns when all members have called it."""
        self._meeting.barrier()

    def fail(self, error: DovetailError) -> None:
        """Breaks the group: this rank can't go on, and who waits for it is told at once."""
        self._meeting.fail(error)

    def settle(self) -> None:
        """Waits for what torch's current stream has to do, so that peers see it."""
        if self._gpu is not None:
            import torch

            torch.cuda.current_stream(self.device).synchronize()

    def _name(self, tensor: torch.Tensor) -> tuple[int | None, bytes, int]:
        address, size = tensor.data_ptr(), tensor.nbytes
        if self._gpu is None:
            offset = address - int(self.group.world.native.base(self.group.world.rank))
            inside = offset >= 0 and offset + size <= self.group.world.memory_bytes[self.group.world.rank]
            return (_SHARED if inside else None), b"", offset
        from dovetail.hw.gpu.world import IN_ARENA, ON_DEVICE

        how, handle, offset = self._gpu.name_of(address, size)
        return (how if how in (ON_DEVICE, IN_ARENA) else None), handle, offset

    def _packed(self, tensor: torch.Tensor) -> bytes:
        if not tensor.nbytes:
            return _NAME.pack(_EMPTY, 0, 0, 0).ljust(_NAME_BYTES, b"\0")
        how, handle, offset = self._name(tensor)
        if how is None:
            raise NotSupported(
                f"peers can't reach this tensor of {tensor.nbytes} bytes on {tensor.device}: take one from "
                "dovetail.empty or Addresses.empty"
            )
        if len(handle) > _HANDLE_BYTES:
            raise HardwareError(f"a memory handle of {len(handle)} bytes; {_HANDLE_BYTES} are expected")
        return _NAME.pack(how, len(handle), offset, tensor.nbytes) + handle.ljust(_HANDLE_BYTES, b"\0")

    def _address(self, rank: int, name: bytes) -> int:
        how, length, offset, _ = (int(n) for n in _NAME.unpack_from(name))
        in_world = self.group.ranks[rank]
        if how == _EMPTY:
            return 0
        if how == _SHARED:
            return int(self.group.world.native.base(in_world)) + offset
        assert self._gpu is not None
        return self._gpu.open(in_world, how, name[_NAME.size :][:length])[0] + offset


class Symmetric:
    """A zeroed tensor on every member of a group, and a table of where each member's is. All members make it together.

    `tensor` is this rank's; `table` is an int64 tensor on the same device, one address per rank, for
    `dovetail.language.peer`. `with Symmetric(...)`, or `close()`.
    """

    def __init__(self, group: Group, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> None:
        self._addresses = Addresses.of(group, device)
        self.group = group
        self.tensor: Any = self._addresses.empty(shape, dtype).zero_()
        self._addresses.settle()
        addresses, notes = self._addresses.exchange([self.tensor], f"{tuple(shape)} {dtype}".encode())
        if len(set(notes)) > 1:
            calls = {rank: f"Symmetric({note.decode()})" for rank, note in enumerate(notes)}
            raise MismatchError("ranks make different symmetric tensors", calls=calls)
        self.table: Any = self._addresses.table(addresses[:, 0])

    def close(self) -> None:
        """Gives the memory back when all members are here: nobody may write to it any more. Safe to call twice."""
        if self.tensor is None:
            return
        self._addresses.settle()
        try:
            if self.group.broken is None and self.group.native is not None:
                self._addresses.barrier()
        finally:
            self.tensor = self.table = None

    def __enter__(self) -> Symmetric:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
