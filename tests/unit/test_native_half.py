"""16-bit floats of a compiler that has no type for them (`native/items.h`), against torch's."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests import standin

NATIVE = Path(__file__).parents[2] / "native"
SOURCE = """
#include "items.h"
using dovetail::base::Half;
static_assert(sizeof(Half::Store) == 2 && std::is_integral_v<Half::Store>);
extern "C" void load(const Half::Store* from, float* to, long n) { while (n--) *to++ = Half::load(*from++); }
extern "C" void save(const float* from, Half::Store* to, long n) { while (n--) *to++ = Half::save(*from++); }
"""


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("half")
    source, library = folder / "half.cpp", folder / "half.so"
    source.write_text(SOURCE)
    flags = ("-std=c++20", "-O2", "-shared", "-fPIC", "-include", "type_traits", "-U__FLT16_MANT_DIG__", f"-I{NATIVE}")
    subprocess.run([standin.compiler(), *flags, str(source), "-o", str(library)], check=True, timeout=60)
    return ctypes.CDLL(str(library))


def _saved(half: ctypes.CDLL, values: NDArray[np.float32]) -> NDArray[np.uint16]:
    out = np.empty(values.size, np.uint16)
    half.save(values.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(out.size))
    return out


def _same(got: NDArray[np.uint16], values: NDArray[np.float32]) -> bool:
    want = torch.from_numpy(values).half().view(torch.int16).numpy().view(np.uint16)
    both_nan = (got & 0x7FFF > 0x7C00) & (want & 0x7FFF > 0x7C00)
    return bool(((got == want) | both_nan).all())


def test_every_half_is_read_and_written_back(half: ctypes.CDLL) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    got = np.empty(halves.size, np.float32)
    half.load(halves.ctypes.data_as(ctypes.c_void_p), got.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(got.size))
    want = torch.from_numpy(halves.view(np.int16)).view(torch.float16).float().numpy()
    assert bool(((got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))).all())
    assert _same(_saved(half, got), got)


def test_floats_are_rounded_to_the_nearest_half_ties_to_even(half: ctypes.CDLL) -> None:
    """Around every middle of two halves, and any floats at all."""
    halves = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float64)
    halves[-1] = 65536.0  # what rounds to infinity
    middles = ((halves[1:] + halves[:-1]) / 2).astype(np.float32).view(np.uint32)
    near = np.concatenate([middles - 1, middles, middles + 1])
    any_at_all = np.random.default_rng(7).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    for bits in (near, near | 0x80000000, any_at_all, np.array([0x7F800000, 0xFF800000, 0x7F800001], np.uint32)):
        values = bits.astype(np.uint32).view(np.float32)
        assert _same(_saved(half, values), values)
