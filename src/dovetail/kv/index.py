"""What is stored, by the tokens that lead to it.

A block's key is a keyed hash of its tokens and of all tokens before it, so equal keys mean equal prefixes and a prefix
is found block by block. The key of the hash is the tenant's salt: two tenants never share a block, and without the
salt a key tells nothing about its tokens. The index lives in memory only, and keeps keys, never tokens.
Not thread-safe: the pool that owns it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PERSON = b"dovetail.kv/1"
_DIGEST_BYTES = 32
MOST_SALT_BYTES = blake2b.MAX_KEY_SIZE


def block_hashes(token_ids: Sequence[int] | NDArray[Any], block_tokens: int, *, salt: bytes) -> list[bytes]:
    """The keys of the full blocks of a prompt, the first block first; a part of a block at the end has none.

    Args:
        token_ids: whole numbers, 0 and above.
        block_tokens: tokens in a block.
        salt: 1 to 64 bytes, one per tenant, secret if keys can be seen by others (``secrets.token_bytes(32)``).
            Whatever else changes what a cache holds for the same tokens (model, adapter, images) belongs in it.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}; a block has 1 token or more")
    if not isinstance(salt, bytes) or not 1 <= len(salt) <= MOST_SALT_BYTES:
        what = f"{len(salt)} bytes" if isinstance(salt, bytes) else type(salt).__name__
        raise ValueError(f"a salt is 1 to {MOST_SALT_BYTES} bytes, not {what}: hash a longer one first")
    tokens = np.asarray(token_ids)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise TypeError(f"token ids are a row of whole numbers, not {tokens.dtype} of shape {tokens.shape}")
    if tokens.size and (tokens.min() < 0 or tokens.max() > np.iinfo(np.int64).max):
        raise ValueError("token ids are 0 and above, below 2**63; put what else tells prompts apart into the salt")
    data = memoryview(tokens.astype("<i8").tobytes())
    step = 8 * block_tokens
    # The size of a block begins the chain: blocks of 16 and of 32 tokens never meet.
    digest = block_tokens.to_bytes(_DIGEST_BYTES, "little")
    keyed = blake2b(key=salt, person=_PERSON, digest_size=_DIGEST_BYTES)
    found: list[bytes] = []
    for at in range(0, len(data) - step + 1, step):
        chain = keyed.copy()
        chain.update(digest)
        chain.update(data[at : at + step])
        digest = chain.digest()
        found.append(digest)
    return found


class State(StrEnum):
    """Of a stored block."""

    WRITING = "writing"  #: copies into its slot are under way: it is never served
    READY = "ready"


@dataclass(slots=True, eq=False)
class Block:
    """One stored block."""

    key: bytes
    slot: int
    state: State = State.WRITING
    num_readers: int = 0  #: fetches in flight; above 0 it is not evicted


class PrefixIndex:
    """Blocks by key."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}

    def add(self, blocks: Sequence[Block]) -> None:
        """Makes blocks known; their keys must be new."""
        new = {block.key: block for block in blocks}
        if len(new) < len(blocks) or not self._blocks.keys().isdisjoint(new):
            raise ValueError(f"of {len(blocks)} blocks to add one is stored already, or stands there twice")
        self._blocks.update(new)

    def remove(self, keys: Sequence[bytes]) -> list[Block]:
        """Forgets blocks and returns them; raises `KeyError` at one that is not there."""
        return [self._blocks.pop(key) for key in keys]

    def get(self, key: bytes) -> Block | None:
        """The block of a key, in whatever state."""
        return self._blocks.get(key)

    def prefix(self, keys: Sequence[bytes]) -> list[Block]:
        """The leading blocks that are READY, up to the first that is not."""
        found: list[Block] = []
        for block in map(self._blocks.get, keys):
            if block is None or block.state is not State.READY:
                break
            found.append(block)
        return found

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())
