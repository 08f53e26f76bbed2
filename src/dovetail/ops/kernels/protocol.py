# mypy: ignore-errors
"""How the kernels of one operator on several ranks meet: words, waits that end, and what is told about a late rank.

Owns the layout of a call's words. Each rank has, on the symmetric heap, the int64 words that peers raise:

    ENTRY[world]  peer p has begun its run: its buffers may be used
    DONE[world]   peer p has stored all (or read all) that it had to
    arrived[...]  parts of p's data are here; the operator says how many

and for itself, in ordinary device memory: EPOCH (runs that have ended), FINISHED (programs), FAILED (a wait ran out in
some run). The operator has counters of its own. All grow and are never reset.

A wait that runs out writes to `status` (one int64 in memory that the host can read) which rank was late for what; the
kernel then ends without touching peers any more, and the host raises. A rank that has failed looks once per wait.
"""

import triton
import triton.language as tl

from dovetail.language.kernels.device import end_epoch, peer, signal, wait

EPOCH, FINISHED, FAILED = (tl.constexpr(n) for n in range(3))
#: What a rank waits for.
ENTRY, DONE, ARRIVED, LOCAL = (tl.constexpr(n) for n in range(4))


@triton.jit
def word(signals, at, FIELD: tl.constexpr, world, index):
    """Pointer to a word of rank `at`: its `index`-th of ENTRY, DONE or ARRIVED."""
    return peer(signals, at, tl.int64) + FIELD * world + index


@triton.jit
def expect(pointer, value, local, status, bound, rank, WHAT: tl.constexpr):
    """Waits for what `rank` signals; False if it did not come in time, in this wait or an earlier one."""
    failed = tl.atomic_add(local + FAILED, 0, sem="relaxed", scope="gpu") != 0
    here = wait(pointer, value, tl.where(failed, 1, bound))
    if not here:
        tl.atomic_xchg(local + FAILED, 1, sem="relaxed", scope="gpu")
        if not failed:
            tl.store(status, (WHAT + 1) * 65536 + rank)
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
