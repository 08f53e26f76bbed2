"""The kernel of the path staged under Triton's interpreter, chunk by chunk, against plain copies; no GPU needed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.interp.child import printed

NUM_CASES = 24


def test_it_moves_what_is_ready_and_says_so(need: Callable[[str, object], None]) -> None:
    need("triton", importlib.util.find_spec("triton"))
    assert printed(__file__) == ["right"] * NUM_CASES


class Case:
    """Copies of random shapes, a cache with gaps, and staging memory of two or three chunks."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.seed, self.unpack = seed, bool(seed % 2)
        self.programs, self.copies, self.rows, self.vectors = (int(rng.integers(1, n)) for n in (6, 9, 6, 9))
        self.row_bytes = 16 * self.vectors
        self.size = self.rows * self.row_bytes
        self.per_chunk, self.num_chunks = int(rng.integers(1, self.copies + 1)), int(rng.integers(2, 4))
        self.total = -(-self.copies // self.per_chunk)
        self.cache = rng.integers(0, 256, 2 * self.copies * self.size, dtype=np.uint8)
        self.at = rng.permutation(self.copies) * 2 * self.size
        self.staging = np.zeros(self.per_chunk * self.size * self.num_chunks, np.uint8)
        self.host = rng.integers(0, 256, (self.copies, self.size), dtype=np.uint8)
        ready, programs = 0 if self.unpack else self.num_chunks, np.arange(self.programs)
        address, pitch = self.cache.ctypes.data + self.at, np.full(self.copies, 2 * self.row_bytes)
        self.words = np.concatenate([[ready], programs, 0 * programs, address, pitch, np.zeros(self.total, np.int64)])

    def launch(self, kernel: Any) -> None:
        block = min(1 << (self.row_bytes // 8 - 1).bit_length(), 8)
        tile = 8 << self.seed % 3  # several rows where rows are short
        kernel[(self.programs,)](
            self.words.ctypes.data, self.staging.ctypes.data, self.copies, self.rows, self.vectors, self.per_chunk,
            self.per_chunk * self.size, self.num_chunks, UNPACK=self.unpack, BLOCK=block, ROWS=tile // block,
        )  # fmt: skip

    def run(self, kernel: Any) -> str:
        """A chunk at a time, as copies come and go; what is wrong, or "right"."""
        for n in range(self.total):
            mine = range(n * self.per_chunk, min((n + 1) * self.per_chunk, self.copies))
            place = self.staging[n % self.num_chunks * self.per_chunk * self.size :]
            if self.unpack:
                place[: len(mine) * self.size] = self.host[mine].reshape(-1)
                self.words[0] = n + 1
            self.launch(kernel)
            if self.words[1 + 2 * self.programs + 2 * self.copies + n] != self.programs:
                return f"chunk {n} is not done with"
            if not self.unpack:
                self.host[mine] = place[: len(mine) * self.size].reshape(len(mine), -1)
                self.words[0] = self.num_chunks + n + 1
        rows = self.at[:, None] + np.arange(self.rows) * 2 * self.row_bytes
        cached = self.cache[rows[..., None] + np.arange(self.row_bytes)].reshape(self.copies, -1)
        return "right" if (cached == self.host).all() else "bytes differ"


if __name__ == "__main__":
    from dovetail.kv.kernels.staged import staged_kernel

    for seed in range(NUM_CASES):
        print(Case(seed).run(staged_kernel))
