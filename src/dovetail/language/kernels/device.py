# mypy: ignore-errors
"""Device functions for kernels that reach other ranks: pointers, stores, signals, waits, order, slices, run numbers.

Owns the memory-order argument of everything built on them:

- Signals are 64-bit counters that only grow. Run `n` raises its signals to `n`, nothing is ever reset.
- `signal` is a release at system scope and `wait` an acquire at system scope: who has waited for a signal sees all
  that was stored before it, on whichever GPU.
- One thread of a program issues an atomic, but all threads have stored their parts of a tile. `fence` is a barrier of
  the program's threads: what they did before it happens before what any of them does after it, so the one thread's
  release covers the whole tile. `signal` and `arrive` begin with it.
- The same holds the other way round: the value that one thread has waited for reaches the others through a barrier.

On CUDA the barrier is written in PTX: Triton stops pipelining a loop that contains `tl.debug_barrier()`, which halves
the speed of a GEMM. Everything else is plain Triton, and the interpreter runs it.
"""

import torch
import triton
import triton.language as tl

# Triton's interpreter has no inline assembly and runs a program in one thread: there a barrier is nothing.
_PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)


@triton.jit
def fence():
    """Threads of this program meet: what any of them did before happens before what any of them does after."""
    if _PTX:
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.debug_barrier()


@triton.jit
def peer(table, rank, dtype: tl.constexpr, ALIGN: tl.constexpr = 16):
    """A pointer to `rank`'s counterpart of a symmetric buffer.

    Args:
        table: pointer to the int64 addresses of all ranks' counterparts (`Symmetric.table`).
        dtype: what it points to, `tl.bfloat16`.
        ALIGN: bytes that its address is a multiple of; symmetric buffers begin at multiples of 4096.
    """
    return tl.multiple_of(tl.load(table + rank).to(tl.pointer_type(dtype)), ALIGN)


@triton.jit
def put(pointer, offsets, value, mask=None):
    """Stores a tile to a peer: `pointer[offsets] = value` where `mask`. A later `signal` tells that it is there."""
    tl.store(pointer + offsets, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def signal(pointer, value, mask=None):
    """Raises the 64-bit word to `value`: whoever sees it sees all that this program stored before.

    A release at system scope, by one thread, behind a barrier of all. `mask` (a scalar) says whether to do it: inside
    a flattened `tl.range` Triton does not take an `if` around an atomic.
    """
    fence()
    tl.atomic_xchg(pointer, value, mask=mask, sem="release", scope="sys")


@triton.jit
def wait(pointer, value, bound):
    """Waits until the 64-bit word has reached `value`, for at most `bound` looks; returns whether it has.

    An acquire at system scope. Compares by signed difference, since the counter only grows. A look takes about a
    microsecond on a GPU: there is no endless loop in a kernel, and whoever gets False ends and tells its host.

    Not for a loop that Triton pipelines: the loads of a later step are moved before it.
    """
    seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
    looks = tl.full((), 1, tl.int64)
    while (seen - value < 0) & (looks < bound):
        seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
        looks += 1
    return seen - value >= 0


@triton.jit
def remote_first(index, rank, world, REMOTE_FIRST: tl.constexpr = True):
    """The `index`-th rank to serve: those after this one first, itself last. Rank 1 of 4: 2, 3, 0, 1.

    Without REMOTE_FIRST itself is first, the others follow: 1, 2, 3, 0.
    """
    if REMOTE_FIRST:
        return (rank + 1 + index) % world
    else:
        return (rank + index) % world


@triton.jit
def arrive(counter, total):
    """Counts a program (or a tile) in; True for the last of `total`, who sees what all of them stored before.

    Acquire and release on this GPU, behind a barrier of the program's threads. The 64-bit counter counts on: in a
    later round the last one is again the one that makes it a multiple of `total`.
    """
    fence()
    return (tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1) % total == 0


@triton.jit
def epoch(word):
    """The number of this run, from 1: one more than the runs that have ended, which `word` counts on the device.

    A kernel that takes its number from here can be captured in a graph: every replay is the next run.
    """
    return tl.load(word) + 1


@triton.jit
def end_epoch(word, finished, run):
    """Ends a program's part of a run; the last one sets `word` for the next run.

    Args:
        finished: a counter of this call's own, see `arrive`.
    """
    last = arrive(finished, tl.num_programs(0))
    tl.atomic_xchg(word, run, mask=last, sem="release", scope="gpu")
