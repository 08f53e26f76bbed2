"""How ranks of one host find each other and hand over their memory.

Each rank makes a memfd (no name in any file system, gone with its last user) and passes it to every other rank over a
Unix socket in the abstract namespace. The other side's user is checked, and its process is held by a pidfd, through
which its death is seen later. Owns the sockets while that lasts; keeps none of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from dataclasses import dataclass

from dovetail.errors import DovetailError, HardwareError, PeerError, Timeout

_CRED = struct.Struct("3i")
_MOST_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank as the others hold it."""

    pid: int
    memory_fd: int
    memory_bytes: int
    pidfd: int  #: -1 for this process itself
    notice: bytes  #: what it told everybody


def make_memory(size_bytes: int) -> int:
    """A memfd of that size; its pages are reserved when they are allocated."""
    try:
        fd = os.memfd_create("dovetail", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
    except OSError as error:
        raise HardwareError(
            f"no shared memory of {size_bytes} bytes: {error.strerror}; DOVETAIL_HEAP sets its size"
        ) from error
    return fd


def meet(token: str, rank: int, size: int, memory_bytes: int, notice: bytes, timeout_s: float) -> list[Member]:
    """Exchanges memory with all ranks of `token`. Blocks until all are there; raises `Timeout` naming who is not."""
    memory = make_memory(memory_bytes)
    hello = json.dumps({"rank": rank, "size": size, "bytes": memory_bytes, "notice": notice.hex()}).encode()
    members: dict[int, Member] = {
        rank: Member(pid=os.getpid(), memory_fd=memory, memory_bytes=memory_bytes, pidfd=-1, notice=notice)
    }
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(_listen(token, rank, size))
            below = [stack.enter_context(_connect(token, r, deadline)) for r in range(rank)]
            for link in below:
                _send(link, hello, memory, deadline)
            for _ in range(rank + 1, size):
                link = stack.enter_context(_accept(listener, deadline, members, size))
                _note(members, _receive(link, deadline), size)
                _send(link, hello, memory, deadline)
            for link in below:
                _note(members, _receive(link, deadline), size)
        except BaseException:
            _let_go(members)
            raise
    return [members[r] for r in range(size)]


def _address(token: str, rank: int) -> str:
    return f"\0dovetail-{token}-{rank}"


def _listen(token: str, rank: int, size: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(token, rank))
    except OSError as error:
        listener.close()
        raise DovetailError(
            f"rank {rank} is there already: two processes with one rank, or init() called twice"
        ) from error
    listener.listen(size)
    return listener


def _connect(token: str, rank: int, deadline: float) -> socket.socket:
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(_address(token, rank))
            return link
        except (ConnectionRefusedError, FileNotFoundError):
            link.close()
            if time.monotonic() > deadline:
                raise Timeout(f"rank {rank} did not come to the rendezvous in time") from None
            time.sleep(0.005)  # not up yet: nothing to wait on before it listens


def _accept(listener: socket.socket, deadline: float, members: dict[int, Member], size: int) -> socket.socket:
    listener.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        return listener.accept()[0]
    except TimeoutError:
        absent = sorted(set(range(size)) - set(members))
        raise Timeout(f"ranks {absent} did not come to the rendezvous in time") from None


def _send(link: socket.socket, hello: bytes, memory: int, deadline: float) -> None:
    link.settimeout(max(0.001, deadline - time.monotonic()))
    socket.send_fds(link, [len(hello).to_bytes(4, "little")], [memory])
    link.sendall(hello)


def _receive(link: socket.socket, deadline: float) -> tuple[dict[str, object], int, int]:
    """The peer's hello, its memory and its pid."""
    link.settimeout(max(0.001, deadline - time.monotonic()))
    pid, uid, _ = _CRED.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CRED.size))
    if uid != os.getuid():
        raise DovetailError(f"a process of user {uid} came to the rendezvous of user {os.getuid()}: refused")
    try:
        head, fds, _, _ = socket.recv_fds(link, 4, 1)
        length = int.from_bytes(head, "little")
        if len(head) < 4 or not fds or length > _MOST_BYTES:
            raise PeerError(f"process {pid} left the rendezvous", rank=-1)
        body = b""
        while len(body) < length:
            part = link.recv(length - len(body))
            if not part:
                raise PeerError(f"process {pid} left the rendezvous", rank=-1)
            body += part
    except TimeoutError:
        raise Timeout(f"process {pid} came to the rendezvous and then fell silent") from None
    return json.loads(body), fds[0], pid


def _note(members: dict[int, Member], heard: tuple[dict[str, object], int, int], size: int) -> None:
    hello, fd, pid = heard
    rank, their_size = int(str(hello["rank"])), int(str(hello["size"]))
    if their_size != size:
        os.close(fd)
        raise DovetailError(f"rank {rank} expects a world of {their_size}, this process one of {size}")
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        os.close(fd)
        raise PeerError(f"rank {rank} (process {pid}) can't be watched: {error.strerror}", rank=rank) from error
    members[rank] = Member(
        pid=pid,
        memory_fd=fd,
        memory_bytes=int(str(hello["bytes"])),
        pidfd=pidfd,
        notice=bytes.fromhex(str(hello["notice"])),
    )


def _let_go(members: dict[int, Member]) -> None:
    for m in members.values():
        os.close(m.memory_fd)
        if m.pidfd >= 0:
            os.close(m.pidfd)
