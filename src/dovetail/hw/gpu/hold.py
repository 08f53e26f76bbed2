"""Keeps every multiprocessor of a GPU busy for a moment, to see what moves without them: the copy engines.

Owns the launch and the bound on its time. The device code is in `kernels/hold.py`. Nothing is held longer than
`MOST_S`: the kernel looks at a clock, and a timer on the host raises the flag.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from dovetail.errors import NotSupported

#: Longest hold.
MOST_S = 0.2
#: Longest wait for all programs to run.
UP_S = 1.0

_THREADS = 1024
_PAUSE_US = 5
#: Words of the flag and the count: on different cache lines.
_FLAG, _UP = 0, 32


class Holder:
    """Holds the multiprocessors of the device that is current when it is made. One hold at a time.

    Raises `NotSupported` where there is no GPU.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise NotSupported("torch sees no GPU here: there are no multiprocessors to hold")
        from dovetail.hw.gpu.kernels.hold import hold_kernel

        self._jit: Any = hold_kernel
        self._hip = torch.version.hip is not None
        many = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        #: Two programs of 1024 threads fill a multiprocessor.
        self.num_programs = 2 * many
        self._pinned = torch.zeros(64, dtype=torch.int32, pin_memory=True)
        self._words = self._pinned.numpy()
        self._busy = threading.Lock()
        # Compiled, loaded and run once, so that a first hold waits for nothing; a raised flag ends it at once.
        self._release()
        cuda: Any = torch.cuda
        warm = cuda.Stream()
        with cuda.stream(warm):
            self._launch()
        warm.synchronize()

    @contextlib.contextmanager
    def hold(self, stream: int) -> Iterator[int]:
        """Launches on the raw stream and gives the number of programs that came up within a second.

        All of `num_programs` means that no other kernel can start. Leaving lets go and waits for the stream.
        Raises `RuntimeError` inside another hold.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this Holder holds already; leave that context first")
        cuda: Any = torch.cuda
        ours = cuda.ExternalStream(stream) if stream else cuda.default_stream()
        timer = threading.Timer(MOST_S, self._release)
        timer.daemon = True
        try:
            self._words[:] = 0
            timer.start()
            with cuda.stream(ours):
                self._launch()
            yield self._wait_up()
        finally:
            timer.cancel()
            timer.join()
            self._release()
            ours.synchronize()
            self._busy.release()

    def _release(self) -> None:
        self._words[_FLAG] = 1

    def _wait_up(self) -> int:
        end = time.monotonic() + UP_S
        while (num_up := int(self._words[_UP])) < self.num_programs and time.monotonic() < end:
            time.sleep(20e-6)
        return num_up

    def _launch(self) -> None:
        ticks_per_us = 100 if self._hip else 1000
        base = self._pinned.data_ptr()
        options: dict[str, int] = {"num_warps": 16} if self._hip else {"num_warps": 32, "maxnreg": 32}
        self._jit[(self.num_programs,)](
            base + 4 * _FLAG,
            base + 4 * _UP,
            int(MOST_S * 1e6) * ticks_per_us,
            _PAUSE_US * ticks_per_us,
            self._hip,
            _THREADS,
            **options,
        )
