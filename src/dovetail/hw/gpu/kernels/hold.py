# mypy: ignore-errors
"""A kernel that takes every multiprocessor and keeps it until the host says otherwise, or a bounded time has passed.

What still moves while it runs was moved by a copy engine. Owns the device code only; `dovetail.hw.gpu.hold` launches
it. Every word it touches is pinned host memory.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer
from triton.language.extra.hip import memrealtime


@triton.jit
def _ticks(HIP: tl.constexpr):
    """A clock: nanoseconds on CUDA, 10 nanoseconds on HIP."""
    if HIP:
        return memrealtime()
    else:
        return globaltimer()


@triton.jit(do_not_specialize=["flag", "up", "most_ticks", "pause_ticks"])
def hold_kernel(
    flag: tl.int64, up: tl.int64, most_ticks: tl.int64, pause_ticks: tl.int64, HIP: tl.constexpr, THREADS: tl.constexpr
):
    """Adds 1 to the int32 at `up`, then stays until the int32 at `flag` is not 0 or `most_ticks` have passed.

    One lane of a program reads the flag, every `pause_ticks`: polling by all would fill the bus that copies need.
    """
    begin = _ticks(HIP)
    lanes = tl.arange(0, THREADS)
    flags = flag.to(tl.pointer_type(tl.int32)) + lanes * 0
    tl.atomic_add(up.to(tl.pointer_type(tl.int32)), 1, sem="release", scope="sys")
    raised = 0
    while raised == 0:
        value = tl.load(flags, mask=lanes == 0, other=0, volatile=True)
        asked = _ticks(HIP)
        # Every thread reads a clock of its own: only the maximum over all is one answer for the whole program.
        late = (asked - begin >= most_ticks).to(tl.int32)
        raised = tl.max(tl.maximum(value, late), axis=0)
        now = asked
        while now - asked < pause_ticks:
            now = _ticks(HIP)
