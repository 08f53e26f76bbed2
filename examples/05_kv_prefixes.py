"""A prefix of a prompt, kept in host memory and brought back into other blocks. Run: python examples/05_kv_prefixes.py

Here the cache is in host memory, so it runs anywhere; `Prefixes.on_gpu` is the same for a cache on a GPU, by its copy
engines.
"""

from __future__ import annotations

import numpy as np

from dovetail.kv import Prefixes, layer_outermost

TOKENS = 16  # of a block


def main() -> None:
    rng = np.random.default_rng(0)
    layout = layer_outermost("small", num_layers=4, row_bytes=4096, num_blocks=64, split=True)
    cache = rng.integers(0, 256, layout.size_bytes, dtype=np.uint8)
    system_prompt = rng.integers(0, 32000, 6 * TOKENS).tolist()
    with Prefixes.on_cpu(layout, cache, pool_bytes=16 << 20) as kept:
        # A first request has computed its KV into blocks 10..15 of the cache: keep them.
        before = rows(layout, cache, 10)
        kept.store(system_prompt, range(10, 16)).wait()
        # A second request begins with the same tokens: what is kept need not be computed again.
        prompt = [*system_prompt, *rng.integers(0, 32000, 40).tolist()]
        print(f"{kept.lookup(prompt)} of {len(prompt)} tokens are kept")
        move = kept.fetch(prompt, range(40, 40 + len(prompt) // TOKENS))
        move.wait()
        assert (rows(layout, cache, 40) == before).all()
        print(f"fetched {move.num_tokens} tokens, {move.size_bytes} bytes")
        assert kept.lookup(prompt, salt=b"another tenant") == 0  # tenants never see each other's
        print(kept.stats())


def rows(layout: object, cache: np.ndarray, block: int) -> np.ndarray:
    """What a block has in every layer."""
    group = layout.groups[0]  # type: ignore[attr-defined]
    begins = (group.bases + block * group.strides).tolist()
    return np.stack([cache[at : at + group.row_bytes] for at in begins])


if __name__ == "__main__":
    main()
