# mypy: ignore-errors
"""How the kernels of one operator on several ranks meet: words, waits that end, and what is told about a late rank.

Owns the layout of a call's words. Each rank has, on the symmetric heap, the int64 words that peers raise:

    ENTRY[world]  peer p has begun its run: its buffers may be used
    DONE[world]   peer p has stored all (or read all) that it had to
    arrived[...]  parts of p's data are here; the operator says how many

and for itself, in ordinary device memory: EPOCH (runs that have ended), FINISHED (programs), FAILED (a wait ran out in
some run), STOPPED (what was seen of STOP, below). The operator has counters of its own. All grow and are never reset.

`status` is int64 words in memory that the host can read and write: LATE, where the first wait of a rank that fails says
which rank was late for what, and STOP, a bit for each rank that the host does not want to be waited for any more (it is
dead, or the group is broken). A wait looks at STOP now and then. When one has failed, all others of the rank end soon,
with True where the signal is there: the kernel goes on with peers that are there, stores nothing for those that are
not, and ends. Its result is void, and the host raises.
"""

import triton
import triton.language as tl

from dovetail.language.kernels.device import end_epoch, peer, signal, wait

EPOCH, FINISHED, FAILED, STOPPED = (tl.constexpr(n) for n in range(4))
#: What a rank waits for.
ENTRY, DONE, ARRIVED, LOCAL = (tl.constexpr(n) for n in range(4))
#: Words of `status`; between them is one for the operator's own errors.
LATE, STOP = tl.constexpr(0), tl.constexpr(2)
#: Looks of a wait between two at STOP, which lies across the host's link.
LOOKS = tl.constexpr(256)


@triton.jit
def word(signals, at, FIELD: tl.constexpr, world, index):
    """Pointer to a word of rank `at`: its `index`-th of ENTRY, DONE or ARRIVED."""
    return peer(signals, at, tl.int64) + FIELD * world + index


@triton.jit
def expect(pointer, value, local, status, bound, rank, WHAT: tl.constexpr):
    """Waits for what `rank` signals; returns whether it is there. Gives up after `bound` looks, when the host says that
    `rank` won't come, and when another wait of this rank has failed, in this run or an earlier one.

    Each thread reads STOP for itself and may see another value than the next; all must leave the loop together. So one
    of them puts what it saw into STOPPED, and what an atomic returns is the same for all."""
    failed = tl.atomic_add(local + FAILED, 0, sem="relaxed", scope="gpu") != 0
    looks = tl.where(failed, 1, tl.minimum(bound, LOOKS))
    here = wait(pointer, value, looks)
    left = tl.where(failed, 0, bound - looks)
    while (not here) & (left > 0):
        failed = tl.atomic_add(local + FAILED, 0, sem="relaxed", scope="gpu") != 0
        told = tl.load(status + STOP, volatile=True)
        stop = tl.atomic_or(local + STOPPED, told, sem="relaxed", scope="gpu") >> rank
        looks = tl.minimum(left, LOOKS)
        here = wait(pointer, value, looks)
        left = tl.where(failed | ((stop & 1) != 0), 0, left - looks)
    if not here:
        before = tl.atomic_xchg(local + FAILED, 1, sem="relaxed", scope="gpu")
        if before == 0:
            tl.store(status + LATE, rank + (WHAT + 1) * 65536)
    return here


@triton.jit
def enter(signals, rank, world, run):
    """Tells every peer that this rank's run has begun; by program 0."""
    if tl.program_id(0) == 0:
        for k in range(1, world):
            signal(word(signals, (rank + k) % world, ENTRY, world, rank), run)


@triton.jit
def leave(signals, local, status, bound, rank, world, run):
    """Waits until all peers are done with this rank, by program 0, and ends the run."""
    if tl.program_id(0) == 0:
        for k in range(1, world):
            other = (rank + k) % world
            expect(word(signals, rank, DONE, world, other), run, local, status, bound, other, DONE)
    end_epoch(local + EPOCH, local + FINISHED, run)


@triton.jit
def tell_done(signals, rank, world, to, run, mask=None):
    """Tells rank `to` that this rank is done with it."""
    signal(word(signals, to, DONE, world, rank), run, mask)


@triton.jit
def first_of(program, begin, PROGRAMS: tl.constexpr):
    """The first number from `begin` on that is this program's, if numbers are dealt out in turns from 0."""
    return begin + (program - begin % PROGRAMS + PROGRAMS) % PROGRAMS
