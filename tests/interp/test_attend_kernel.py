"""Attention over scattered tokens under Triton's interpreter, against plain softmax; no GPU needed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import torch

from tests.interp.child import printed

NUM_CASES = 12


def test_it_is_attention(need: Callable[[str, object], None]) -> None:
    need("triton", importlib.util.find_spec("triton"))
    need("transformers", importlib.util.find_spec("transformers"))
    assert printed(__file__) == ["right"] * 2 * NUM_CASES


def case(seed: int) -> str:
    """Some tokens behind others, in a memory that is full of no-numbers elsewhere; what is wrong, or "right"."""
    from dovetail.kv.transformers.attention import attend

    rng = np.random.default_rng(seed)
    num_heads, group, width = (int(rng.choice(n)) for n in ([1, 2, 3], [1, 3, 4], [16, 32]))
    before, count = int(rng.integers(0, 300)), int(rng.choice([1, 2, 8, 32]))
    number, size = before + count, before + count + 50
    make = torch.Generator().manual_seed(seed)
    rows = torch.randperm(size, generator=make)
    tokens = torch.full((size, 2, num_heads, width), float("nan"))
    tokens[rows[:number]] = torch.randn((number, 2, num_heads, width), generator=make)
    queries = torch.randn((count, num_heads * group, width), generator=make).transpose(0, 1)
    positions = torch.arange(before, number).clamp(max=number - 1 - seed % 2)  # the last may be there twice
    found = attend(queries, tokens, rows[None], positions, 0.3)
    keys, values = (tokens[rows[:number], n].transpose(0, 1).repeat_interleave(group, 0) for n in (0, 1))
    score = 0.3 * queries @ keys.transpose(1, 2)
    score = score.masked_fill(torch.arange(number) > positions[:, None], float("-inf"))
    right = (score.softmax(-1) @ values).transpose(0, 1)
    error = (found - right).abs().nan_to_num(float("inf")).max().item()
    return "right" if error < 1e-4 else f"seed {seed}: {error}"


def apart(seed: int) -> str:
    """A token of each of several sequences, which share a memory: the same as each alone."""
    from dovetail.kv.transformers import attention

    attention._MOST_TILE = 16  # a group may have more heads
    rng = np.random.default_rng(seed)
    num_heads, group, width, count = (int(rng.choice(n)) for n in ([1, 2], [1, 3, 20], [16, 32], [2, 4, 8]))
    make = torch.Generator().manual_seed(seed)
    lengths = rng.integers(1, 200, count).tolist()
    mixed = torch.randperm(sum(lengths) + 50, generator=make)
    tokens = torch.full((len(mixed), 2, num_heads, width), float("nan"))
    queries = torch.randn((count, num_heads * group, width), generator=make).transpose(0, 1)
    rows, right = torch.full((count, 250), len(mixed) - 1), []
    for n, (length, mine) in enumerate(zip(lengths, mixed.split([*lengths, 50]), strict=False)):
        rows[n, :length] = mine
        tokens[mine] = torch.randn((length, 2, num_heads, width), generator=make)
        keys, values = (tokens[mine, side].transpose(0, 1).repeat_interleave(group, 0) for side in (0, 1))
        score = 0.3 * queries[:, n : n + 1] @ keys.transpose(1, 2)
        right.append((score.softmax(-1) @ values)[:, 0])
    found = attention.attend(queries, tokens, rows, torch.tensor(lengths) - 1, 0.3)
    error = (found - torch.stack(right)).abs().nan_to_num(float("inf")).max().item()
    return "right" if error < 1e-4 else f"seed {seed}: {error}"


if __name__ == "__main__":
    for n in range(NUM_CASES):
        print(case(n))
    for n in range(NUM_CASES):
        print(apart(n))
