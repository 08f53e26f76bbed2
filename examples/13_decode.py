"""Tensor-parallel decoding: heads and hidden units shared by ranks, each row-parallel product summed as it is computed.

Run: python examples/13_decode.py. A small transformer with random weights writes greedily, token by token, from a cache
of keys and values of which each rank has its own heads. The tokens are those of the whole model in one process.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as fn

import dovetail
from dovetail.ops import RowParallelLinear

LAYERS, WIDTH, HEADS, VOCABULARY = 3, 128, 8, 512
PROMPT, TOKENS, SEQUENCES = 6, 24, 4
Cache = list[tuple[torch.Tensor, torch.Tensor]]


def row_parallel(full: torch.Tensor, rank: int, size: int) -> nn.Module:
    """This rank's input features of a weight [n, k]; the output is the sum over ranks. Alone: a linear layer."""
    n, k = full.shape
    made = RowParallelLinear(k, n) if size > 1 else nn.Linear(k, n, bias=False)
    made.weight.data = full.chunk(size, 1)[rank]
    return made


class Layer:
    """Attention and an MLP; of both, this rank's share."""

    def __init__(self, seed: int, rank: int, size: int) -> None:
        torch.manual_seed(seed)
        *qkv, out, up, down = (torch.randn(n * WIDTH, WIDTH) / WIDTH**0.5 for n in (1, 1, 1, 1, 4, 4))
        self.heads, self.qkv = HEADS // size, [w.chunk(size)[rank] for w in qkv]
        self.out = row_parallel(out, rank, size)
        self.up = up.chunk(size)[rank]
        self.down = row_parallel(down.t(), rank, size)

    def step(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        """One token of each sequence, [sequences, width]."""
        h = fn.rms_norm(x, (WIDTH,))
        q, k, v = ((h @ w.t()).view(SEQUENCES, self.heads, 1, -1) for w in self.qkv)
        cache.append((k, v))
        keys, values = (torch.cat(list(kept), 2) for kept in zip(*cache, strict=True))
        x = x + self.out(fn.scaled_dot_product_attention(q, keys, values).view(SEQUENCES, -1))
        return x + self.down(fn.gelu(fn.rms_norm(x, (WIDTH,)) @ self.up.t()))


@torch.no_grad()
def decode(rank: int = -1, size: int = 2) -> list[list[int]]:
    """The tokens of every sequence; by default this is a rank of the world."""
    torch.set_num_threads(1)  # ranks share the cores
    rank = dovetail.init().rank if rank < 0 else rank
    torch.manual_seed(99)
    embedding, head, position = torch.randn(3, VOCABULARY, WIDTH)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, PROMPT))
    layers = [Layer(seed, rank, size) for seed in range(LAYERS)]
    caches: list[Cache] = [[] for _ in layers]
    for at in range(PROMPT + TOKENS - 1):
        x = embedding[tokens[:, at]] + position[at]
        for layer, cache in zip(layers, caches, strict=True):
            x = layer.step(x, cache)
        if at + 1 == tokens.shape[1]:  # the prompt is read
            tokens = torch.cat([tokens, (x @ head.t()).argmax(1, keepdim=True)], 1)
    return tokens[:, PROMPT:].tolist()


def main() -> None:
    alone = decode(rank=0, size=1)
    for rank, tokens in enumerate(dovetail.launch(decode, ranks=2)):
        assert tokens == alone, f"rank {rank} writes something else"
    for sequence in alone:
        print(" ".join(f"{token:3}" for token in sequence[:16]), "...")
    print(f"{SEQUENCES} x {TOKENS} tokens, the same by two ranks with {HEADS // 2} heads each as by one with {HEADS}")


if __name__ == "__main__":
    main()
