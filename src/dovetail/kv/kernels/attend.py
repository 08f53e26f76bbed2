# mypy: ignore-errors
"""Attention over tokens where they lie in a paged cache: nothing is gathered first.

Owns the device code only. The tokens are shared out among programs (parts), whose results are then merged: a request
alone has too few heads to keep a GPU busy. A query head's group are the heads that share its K and V.
"""

import triton
import triton.language as tl


@triton.jit
def attend_kernel(
    queries,
    head_stride,
    token_stride,
    tokens,
    rows,
    row_stride,
    positions,
    found,
    weights,
    scale,
    NUM_TOKENS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    APART: tl.constexpr,
):
    """One part of the tokens for a tile of queries of one head of K and V.

    Queries are [NUM_HEADS * GROUP, NUM_TOKENS, WIDTH] with the given strides; `tokens` has K and V of each token side
    by side, [2, NUM_HEADS, WIDTH], and token n is number rows[n]. Query token s sees tokens up to positions[s]; the
    last position is the largest. Writes, for each part, head and query (s * GROUP + member), the mean of V into
    `found` and the base-2 logarithm of the sum of its weights into `weights`. `scale` includes the logarithm of e.

    APART: each query token is of a sequence of its own, and tiles are of one: the tokens of sequence s are numbers
    rows[s * row_stride + n], and no position need be the largest.
    """
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane, width = tl.arange(0, TILE), tl.arange(0, WIDTH)
    if APART:
        TILES: tl.constexpr = (GROUP + TILE - 1) // TILE
        last, member = tile // TILES, tile % TILES * TILE + lane
        there, token, query = member < GROUP, lane * 0 + last, last * GROUP + member
        rows += last.to(tl.int64) * row_stride
    else:
        query, last = tile * TILE + lane, NUM_TOKENS - 1
        there, member, token = query < NUM_TOKENS * GROUP, query % GROUP, query // GROUP
    at = queries + (head * GROUP + member).to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
    mine = tl.load(at[:, None] + width[None, :], mask=there[:, None], other=0.0)
    position = tl.load(positions + token, mask=there, other=0)
    number = tl.load(positions + last) + 1
    share = tl.cdiv(tl.cdiv(number, KEYS), PARTS) * KEYS
    end = tl.minimum((part + 1) * share, tl.max(position, 0) + 1)
    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mean = tl.zeros([TILE, WIDTH], tl.float32)
    for first in range(part * share, end, KEYS):
        key = first + tl.arange(0, KEYS)
        known = key < end
        row = tl.load(rows + key, mask=known, other=0)
        side = tokens + row * (2 * NUM_HEADS * WIDTH) + head * WIDTH
        keys = tl.load(side[None, :] + width[:, None], mask=known[None, :], other=0.0)
        score = tl.dot(mine, keys) * scale
        score = tl.where(known[None, :] & (key[None, :] <= position[:, None]), score, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # a query that has seen nothing yet
        weight, fade = tl.exp2(score - base[:, None]), tl.exp2(largest - base)
        values = tl.load(side[:, None] + NUM_HEADS * WIDTH + width[None, :], mask=known[:, None], other=0.0)
        total = total * fade + tl.sum(weight, 1)
        mean = tl.dot(weight.to(values.dtype), values, mean * fade[:, None])
        largest = larger
    seen = total > 0
    mean = mean / tl.where(seen, total, 1.0)[:, None]
    place = ((part * NUM_HEADS + head) * NUM_TOKENS * GROUP + query).to(tl.int64)
    tl.store(found + place[:, None] * WIDTH + width[None, :], mean, mask=there[:, None])
    tl.store(weights + place, tl.where(seen, largest + tl.log2(tl.where(seen, total, 1.0)), float("-inf")), mask=there)


@triton.jit
def merge_kernel(
    found,
    weights,
    out,
    NUM_TOKENS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merges the parts of one query: `out` is [NUM_TOKENS, NUM_HEADS * GROUP, WIDTH]."""
    token, query_head = tl.program_id(0), tl.program_id(1)
    head, member = query_head // GROUP, query_head % GROUP
    part, width = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    place = (part * NUM_HEADS + head) * NUM_TOKENS * GROUP + token * GROUP + member
    weight = tl.load(weights + place)
    weight = tl.exp2(weight - tl.max(weight, 0))
    means = tl.load(found + place.to(tl.int64)[:, None] * WIDTH + width[None, :])
    mean = tl.sum(means * weight[:, None], 0) / tl.sum(weight, 0)
    at = out + (token * NUM_HEADS * GROUP + query_head).to(tl.int64) * WIDTH + width
    tl.store(at, mean.to(out.dtype.element_ty))
