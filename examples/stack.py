"""The layer that examples 07 and 08 compute, with random weights that are the same whenever they are made."""

from __future__ import annotations

import torch
from torch.nn import functional

HEAD = 64  # width of an attention head
Weights = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, int]]


def layer_shapes(width: int) -> Shapes:
    return {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}


def random_weights(seed: int, shapes: Shapes, device: str, dtype: torch.dtype) -> Weights:
    made = torch.Generator(device).manual_seed(seed)
    return {
        name: torch.randn(shape, generator=made, device=device, dtype=dtype) * shape[0] ** -0.5
        for name, shape in shapes.items()
    }


def without_values(shapes: Shapes, dtype: torch.dtype) -> Weights:
    """For a shelf whose items are stored later."""
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}


def normed(x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:])


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x @ up) @ down


def layer(w: Weights, x: torch.Tensor) -> torch.Tensor:
    """A transformer's: attention, then an MLP. `x`: sequences, tokens, width."""
    q, k, v = (normed(x) @ w["qkv"]).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.transpose(1, 2).flatten(2) @ w["out"]
    return x + mlp(normed(x), w["up"], w["down"])
