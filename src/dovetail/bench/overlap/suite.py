"""The suite "llama": pairs as they come in training and serving LLaMA-70B and -405B, scaled to one GPU and its link.

Computations: bf16 matrix products of M tokens, K and N of the models divided by a degree of tensor parallelism;
decoding ones of few rows, which wait for their weights; a sum of vectors. Communications: collectives with peers in
host memory and the jobs of a host link. Scenarios of one computation stand together, so that it is made once.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from dovetail.bench.overlap.spec import Compute, Job, Make, Scenario
from dovetail.measure.sizes import format_bytes
from dovetail.overlap.tasks import Bound


def _mm(name: str, bound: Bound, m: int, k: int, n: int, small: tuple[int, int, int], operands: int = 1) -> Compute:
    return Compute(name=name, bound=bound, make=Make.MM, shape=(m, k, n), small=small, operands=operands)


_ATTN = _mm("70b-attn", Bound.COMPUTE, 8192, 8192, 8192 // 4, (96, 256, 256))
_UP = _mm("70b-up", Bound.COMPUTE, 8192, 8192, 28672 // 8, (128, 256, 256))
_DOWN = _mm("70b-down", Bound.COMPUTE, 8192, 28672 // 4, 8192, (128, 256, 384))
_ATTN_405 = _mm("405b-attn", Bound.COMPUTE, 4096, 16384, 16384 // 8, (96, 384, 256))
_UP_405 = _mm("405b-up", Bound.COMPUTE, 4096, 16384, 53248 // 8, (128, 384, 384))
_DOWN_405 = _mm("405b-down", Bound.COMPUTE, 8192, 53248 // 8, 16384, (192, 384, 384))
_DECODE = _mm("70b-decode", Bound.MEMORY, 32, 8192, 28672, (2, 512, 1024))
_DECODE_405 = _mm("405b-decode", Bound.MEMORY, 16, 16384, 53248 // 8, (1, 1024, 512), operands=2)
# 1.5 GiB read and written.
_STREAM = Compute(name="stream", bound=Bound.STREAM, make=Make.ADD, shape=(256 << 20,), small=(128 << 10,))
_CHUNK = _mm("70b-attn-tp8-chunk", Bound.COMPUTE, 512, 8192 // 8, 8192, (32, 64, 64))
_SLICE = _mm("70b-decode-tp8", Bound.MEMORY, 16, 8192, 28672 // 8, (1, 128, 256), operands=6)
_NORM = Compute(name="residual", bound=Bound.STREAM, make=Make.ADD, shape=(4 << 20,), small=(8 << 10,), operands=16)

_GATHER = Job(name="all_gather", kind="all_gather", small="all_gather")
_TO_ALL = Job(name="all_to_all", kind="all_to_all", small="all_to_all")
_SCATTER = Job(name="reduce_scatter", kind="reduce_scatter", small="reduce_scatter")
_WEIGHTS = Job(name="weights", kind="fetch", small="all_gather")
_EXPERTS = Job(name="experts", kind="fetch", small="all_to_all", num_pieces=4)
_OPTIMIZER = Job(name="optimizer", kind="offload", small="all_reduce", num_pieces=2)
_CHECKPOINT = Job(name="checkpoint", kind="store", small="all_gather", num_pieces=2)


def _sized(kind: str, piece_bytes: int) -> Job:
    return Job(name=f"{kind}-{format_bytes(piece_bytes)}", kind=kind, small=kind, piece_bytes=piece_bytes)


_K, _M = 1 << 10, 1 << 20
_PAIRS: tuple[tuple[Compute, tuple[tuple[Job, float], ...]], ...] = (
    (_ATTN, ((_GATHER, 1), (_GATHER, 4), (_TO_ALL, 2))),
    (_UP, ((_GATHER, 1 / 2), (_TO_ALL, 1), (_CHECKPOINT, 1 / 2), (_SCATTER, 1))),
    (_DOWN, ((_GATHER, 1), (_WEIGHTS, 2))),
    (_ATTN_405, ((_TO_ALL, 1 / 2), (_CHECKPOINT, 4))),
    (_UP_405, ((_GATHER, 2), (_EXPERTS, 1))),
    (_DOWN_405, ((_GATHER, 1 / 4), (_TO_ALL, 1 / 2), (_OPTIMIZER, 1), (_SCATTER, 1 / 2))),
    (_DECODE, ((_GATHER, 1), (_TO_ALL, 2), (_WEIGHTS, 4), (_EXPERTS, 1 / 2), (_SCATTER, 2))),
    (_DECODE_405, ((_GATHER, 1 / 2), (_TO_ALL, 1), (_WEIGHTS, 2))),
    (_STREAM, ((_GATHER, 2), (_TO_ALL, 1), (_OPTIMIZER, 1), (_CHECKPOINT, 1 / 2), (_SCATTER, 1 / 4))),
    (_CHUNK, (
        (_sized("all_gather", 4 * _K), 1 / 2), (_sized("all_to_all", 16 * _K), 1 / 2),
        (_sized("all_gather", 64 * _K), 1), (_sized("all_to_all", 256 * _K), 1), (_sized("all_gather", _M), 2),
        (_sized("reduce_scatter", 64 * _K), 1),
    )),
    (_SLICE, (
        (_sized("all_gather", 4 * _K), 1 / 4), (_sized("all_to_all", 4 * _K), 1 / 2),
        (_sized("all_gather", 256 * _K), 1), (_sized("all_to_all", _M), 4),
        (Job(name="page-1M", kind="fetch", small="all_gather", piece_bytes=_M), 1),
    )),
    (_NORM, (
        (_sized("all_gather", 16 * _K), 1), (_sized("all_to_all", 64 * _K), 1), (_sized("all_gather", _M), 4),
        (_sized("reduce_scatter", _M), 2),
    )),
)  # fmt: skip
LLAMA = tuple(Scenario(compute=compute, job=job, ratio=float(r)) for compute, jobs in _PAIRS for job, r in jobs)
SUITES = {"llama": LLAMA}
#: What `--quick` measures: each of these is another case.
QUICK = (
    "70b-attn+all_gather@1", "405b-down+all_gather@1/4", "70b-decode+all_to_all@2", "stream+optimizer@1",
    "70b-attn-tp8-chunk+all_gather-64K@1", "residual+reduce_scatter-1M@2",
)  # fmt: skip


def pick(names: Sequence[str], suite: str = "llama") -> tuple[Scenario, ...]:
    """The scenarios of these names, in the suite's order; `*` stands for anything. ValueError for one of none."""
    if suite not in SUITES:
        raise ValueError(f"--suite: {suite!r} is not known; there is {', '.join(SUITES)}")
    known = SUITES[suite]
    for name in names:
        if not any(fnmatch.fnmatchcase(scenario.name, name) for scenario in known):
            raise ValueError(f"--scenario: {name!r} is none of {', '.join(scenario.name for scenario in known)}")
    return tuple(s for s in known if any(fnmatch.fnmatchcase(s.name, name) for name in names))
