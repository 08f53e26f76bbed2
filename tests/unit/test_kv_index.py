"""Keys of token blocks, the index of what is stored, and the order in which it goes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dovetail.kv.index import Block, PrefixIndex, State, block_hashes
from dovetail.kv.policy import LRU

SALT = b"tenant a"
tokens = some.lists(some.integers(0, 3), max_size=24)


@settings(deadline=None)
@given(a=tokens, b=tokens, size=some.integers(1, 5))
def test_equal_keys_mean_equal_prefixes(a: list[int], b: list[int], size: int) -> None:
    first, second = block_hashes(a, size, salt=SALT), block_hashes(b, size, salt=SALT)
    assert len(first) == len(a) // size
    for k in range(min(len(first), len(second))):
        assert (first[k] == second[k]) == (a[: (k + 1) * size] == b[: (k + 1) * size])
    assert len(set(first)) == len(first)
    assert not set(first) & set(second[1:]) or a[:size] == b[:size]


@settings(deadline=None)
@given(a=tokens, b=tokens, sizes=some.tuples(some.integers(1, 5), some.integers(1, 5)))
def test_nothing_is_shared_over_salts_or_block_sizes(a: list[int], b: list[int], sizes: tuple[int, int]) -> None:
    mine = set(block_hashes(a, sizes[0], salt=SALT))
    assert not mine & set(block_hashes(b, sizes[0], salt=b"tenant b"))
    assert not mine & set(block_hashes(b, sizes[0], salt=SALT + b"\0")), "padding of the salt"
    if sizes[0] != sizes[1]:
        assert not mine & set(block_hashes(b, sizes[1], salt=SALT))


def test_any_kind_of_whole_number() -> None:
    plain = block_hashes([1, 2, 3, 300], 2, salt=SALT)
    for kind in ("<i4", ">i4", "<i8", "u2", "u8"):
        assert block_hashes(np.array([1, 2, 3, 300], kind), 2, salt=SALT) == plain
    assert block_hashes(np.array([1, 0, 2, 0, 3, 0, 300, 0])[::2], 2, salt=SALT) == plain
    assert block_hashes([], 2, salt=SALT) == block_hashes([1], 2, salt=SALT) == []
    assert all(len(key) == 32 for key in plain)


def test_keys_stay_what_they_are() -> None:
    """A change of the hash would make every key of a running peer unknown: it must be meant."""
    assert [key.hex()[:16] for key in block_hashes(range(4), 2, salt=SALT)] == ["c7cabb248f92d2e8", "3f21a7e0f0486a3d"]


def test_tokens_are_not_kept() -> None:
    secret = np.arange(7_000_000, 7_000_016)
    index = PrefixIndex()
    index.add([Block(key, k) for k, key in enumerate(block_hashes(secret, 4, salt=SALT))])
    kept = pickle.dumps(index)
    assert not any(int(token).to_bytes(4, "little") in kept for token in secret)
    assert SALT not in kept


@pytest.mark.parametrize(
    ("given", "size", "salt", "error", "text"),
    [
        ([1], 0, SALT, ValueError, "block_tokens is 0"),
        ([1], 1, b"", ValueError, "a salt is 1 to 64 bytes, not 0 bytes"),
        ([1], 1, b"x" * 65, ValueError, "not 65 bytes: hash a longer one"),
        ([1], 1, "salt", ValueError, "not str"),
        ([1.0], 1, SALT, TypeError, "whole numbers, not float64"),
        ([[1]], 1, SALT, TypeError, r"of shape \(1, 1\)"),
        ([3, -1], 1, SALT, ValueError, "token ids are 0 and above"),
        (np.array([1 << 63], np.uint64), 1, SALT, ValueError, "below 2\\*\\*63"),
    ],
    ids=["no tokens", "no salt", "long salt", "text salt", "floats", "two dimensions", "negative", "too large"],
)
def test_bad_input(given: Any, size: int, salt: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        block_hashes(given, size, salt=salt)


def test_index() -> None:
    index = PrefixIndex()
    blocks = [Block(bytes([k]), k, State.READY) for k in range(4)]
    index.add(blocks)
    keys = [block.key for block in blocks]
    assert index.prefix([*keys, b"?"]) == blocks
    blocks[2].state = State.WRITING
    assert index.prefix(keys) == blocks[:2], "a block being written ends the prefix"
    assert index.remove([keys[0]]) == [blocks[0]]
    assert index.prefix(keys) == []
    assert index.prefix(keys[1:]) == blocks[1:2]
    assert (len(index), set(index)) == (3, set(blocks[1:]))
    assert index.get(keys[0]) is None
    assert index.get(keys[3]) is blocks[3]
    assert keys[3] in index
    with pytest.raises(KeyError):
        index.remove([keys[0]])
    for twice in ([Block(keys[3], 9)], [Block(b"new", 8), Block(b"new", 9)]):
        with pytest.raises(ValueError, match="stored already, or stands there twice"):
            index.add(twice)
    assert len(index) == 3


def test_lru_lets_the_end_of_the_oldest_prefix_go_first() -> None:
    lru = LRU()
    lru.inserted([b"a0", b"a1", b"a2"])
    lru.inserted([b"b0", b"b1"])
    lru.touched([b"a0", b"a1"])
    everything = [b"a2", b"b1", b"b0", b"a1", b"a0"]
    assert list(lru.victims(9, lambda key: True)) == everything
    assert list(lru.victims(2, lambda key: True)) == everything[:2]
    assert list(lru.victims(2, lambda key: key != b"b1")) == [b"a2", b"b0"]
    assert list(lru.victims(0, lambda key: True)) == []
    lru.removed([b"b1", b"a0"])
    lru.inserted([b"a2"])
    assert list(lru.victims(9, lambda key: True)) == [b"b0", b"a1", b"a2"]
