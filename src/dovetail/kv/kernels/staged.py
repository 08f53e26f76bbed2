# mypy: ignore-errors
"""Moves rows between staging memory and a cache, both on the GPU: the second half of the path `staged`.

Owns the device code only. All copies of a launch have the same rows of the same whole number of 16 bytes.
"""

import triton
import triton.language as tl

_NUMBERS = ["words", "staging", "num_copies", "num_rows", "num_vectors", "per_chunk", "chunk_bytes", "num_chunks"]


@triton.jit(do_not_specialize=_NUMBERS)
def staged_kernel(
    words: tl.int64,
    staging: tl.int64,
    num_copies: tl.int64,
    num_rows: tl.int64,
    num_vectors: tl.int64,
    per_chunk: tl.int64,
    chunk_bytes: tl.int64,
    num_chunks: tl.int64,
    UNPACK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Moves whatever is ready: chunks that have arrived (UNPACK), or that may be filled.

    `words` has: how many chunks are ready; of each program its next tile; of each program how many chunks it is done
    with; of each copy its address in the cache; of each copy its pitch; of each chunk how many programs are done with
    it. A launch goes on where the one before it stopped, so one that finds a place between two kernels of others
    catches up with all that has arrived by then. Programs never share a tile: BLOCK words of each of ROWS rows, since a
    short row alone would keep too few bytes on their way. Copy k lies in staging memory in chunk k // per_chunk, modulo
    `num_chunks`, rows without gaps. Example: 3 chunks ready, of 2 copies each: copies 0 to 5.

    Whoever sees that all programs are done with a chunk may overwrite it (UNPACK), or read it: each program says so
    with a release, behind a barrier of its threads, after its last access.
    """
    VECTORS: tl.constexpr = BLOCK // 2
    lanes = tl.arange(0, BLOCK)[None, :]
    parts = (num_vectors + VECTORS - 1) // VECTORS
    per_chunk_tiles = (per_chunk * num_rows + ROWS - 1) // ROWS * parts
    programs = tl.num_programs(0)
    word = words.to(tl.pointer_type(tl.int64))
    mine = word + 1 + tl.program_id(0)
    address = word + 1 + 2 * programs
    pitch, done = address + num_copies, address + 2 * num_copies
    total = (num_copies + per_chunk - 1) // per_chunk
    ready = tl.minimum(tl.atomic_add(word, 0, sem="acquire", scope="sys"), total)
    tile, chunk = tl.load(mine), tl.load(mine + programs)
    while chunk < ready:
        rows = tl.minimum(num_copies - chunk * per_chunk, per_chunk) * num_rows
        first, end = chunk * per_chunk_tiles, chunk * per_chunk_tiles + (rows + ROWS - 1) // ROWS * parts
        begin = staging + (chunk % num_chunks) * chunk_bytes
        while tile < end:
            part = (tile - first) % parts
            row = (tile - first) // parts * ROWS + tl.arange(0, ROWS)
            there, copy = row < rows, chunk * per_chunk + row // num_rows
            left = tl.minimum(num_vectors - part * VECTORS, VECTORS).to(tl.int32) * 2
            cached = tl.load(address + copy, mask=there) + row % num_rows * tl.load(pitch + copy, mask=there)
            cached, staged = cached + part * BLOCK * 8, begin + row * num_vectors * 16 + part * BLOCK * 8
            cache_at = tl.multiple_of(cached[:, None].to(tl.pointer_type(tl.int64)) + lanes, (8, 16))
            staged_at = tl.multiple_of(staged[:, None].to(tl.pointer_type(tl.int64)) + lanes, (8, 16))
            mask = there[:, None] & (lanes < left)
            if UNPACK:
                tl.store(cache_at, tl.load(staged_at, mask=mask), mask=mask)
            else:
                tl.store(staged_at, tl.load(cache_at, mask=mask), mask=mask)
            tile += programs
        tl.debug_barrier()
        tl.atomic_add(done + chunk, 1, sem="release", scope="sys")
        chunk += 1
    tl.store(mine, tile)
    tl.store(mine + programs, chunk)
