"""Copies by cores: how they are cut, and plans whose copies a kernel does, on the stand-in driver."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from dovetail.hw.gpu import cores

_COPIES = some.lists(some.integers(1, 5000), min_size=1, max_size=9)


@given(_COPIES, some.integers(1, 700))
def test_pieces_are_the_same_bytes(sizes: list[int], piece_bytes: int) -> None:
    size = np.array(sizes, np.int64)
    begin = np.cumsum(size) - size
    to, of, length = cores.pieces(begin + 10**6, begin, size, piece_bytes)
    assert (to - of == 10**6).all()
    assert (length > 0).all()
    assert (length <= piece_bytes).all()
    moved = np.zeros(size.sum(), np.int64)
    for at, number in zip(of, length, strict=True):
        moved[at : at + number] += 1
    assert (moved == 1).all()


def test_pieces_of_all_copies_get_on_together() -> None:
    size = np.array([300, 100, 300], np.int64)
    _, of, _ = cores.pieces(np.zeros(3, np.int64), np.array([0, 1000, 2000]), size, 100)
    assert of.tolist() == [0, 1000, 2000, 100, 2100, 200, 2200]


def test_a_kernel_has_programs() -> None:
    with pytest.raises(ValueError, match="at least one program"):
        cores.StandInCopier(None, 0)  # type: ignore[arg-type]
