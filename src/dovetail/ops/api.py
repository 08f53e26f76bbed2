"""The operators, for people. Each is differentiable, works in `torch.compile(fullgraph=True)`, and gives equal results
on CPUs and GPUs, fused or not.

`group` is a `Group`, a torch `ProcessGroup` or a one-dimensional `DeviceMesh`; None is the world. `transport` is
"auto", "unfused" (torch's operator, then a collective), "decomposed" (chunks of it), "store" (compute cores write into
the peers' memory) or "dma" (finished slices release copies by an engine). Large results that peers write lie on the
symmetric heap.

Raises, all of them:
    ValueError, TypeError, IndexError, NotSupported: wrong arguments. The other ranks get a `MismatchError` that quotes
        it; nothing was moved and the group goes on.
    MismatchError: the ranks do not make the same call; likewise.
    PeerError, Timeout: a rank died, or made no progress; the group is broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import torch

from dovetail.ops import calls, library, quick, run
from dovetail.ops.backward import ADAGRAD, SGD
from dovetail.ops.choose import AUTO, Choice
from dovetail.ops.names import name_of, named

_ops = library._ops


def _wants_gradients(*tensors: Any) -> bool:
    """Whether a call that is not being compiled must go through torch's dispatcher."""
    if torch.is_grad_enabled():
        for t in tensors:
            if isinstance(t, torch.Tensor) and t.requires_grad:
                return True
    return False


def gemm_all_to_all(
    x: torch.Tensor,
    w: torch.Tensor,
    output_splits: Any = None,
    input_splits: Any = None,
    *,
    group: Any = None,
    transport: str = AUTO,
) -> torch.Tensor:
    """The product x @ w.T on the expert's rank, its rows sent to the tokens' ranks: a mixture of experts' combine.

    Args:
        x: [rows, k], the rows grouped by destination.
        w: [n, k].
        output_splits: rows that come from each rank, as for `all_to_all_single`; with neither, pieces are equal.
        input_splits: rows that go to each rank. Numbers, or a tensor; one on a GPU is read with a synchronisation.

    Returns:
        [sum(output_splits), n], grouped by source.
    """
    if _is_traced():
        return _ops.gemm_all_to_all(x, w, output_splits, input_splits, name_of(group), transport)  # type: ignore[no-any-return]
    ranks, traced = named(name_of(group)), _wants_gradients(x, w)
    if not traced:
        if output_splits is input_splits is None:
            found = quick.run(ranks, "gemm_all_to_all", x, w, transport)
        else:
            found = quick.run(ranks, quick.UNEVEN, x, w, transport, (output_splits, input_splits))
        if found is not None:
            return found

    def make(n: int) -> calls.GemmAllToAll:
        return calls.gemm_all_to_all(x, w, output_splits, input_splits, n)

    if traced:
        call, _ = run.checked(ranks, make, transport)
        splits = (None, None) if call.even else (list(call.receive), list(call.send))
        return _ops.gemm_all_to_all(x, w, *splits, name_of(group), transport)  # type: ignore[no-any-return]
    return run.run(ranks, make, transport)


def gemv_all_reduce(x: torch.Tensor, w: torch.Tensor, *, group: Any = None, transport: str = AUTO) -> torch.Tensor:
    """The sum over ranks of x @ w.T, for the few rows of a decoding step.

    Args:
        x: [m, k], m up to 64; this rank's part of the inner dimension.
        w: [n, k].

    Returns:
        [m, n], the same bits on every rank: partial products are rounded to the dtype, added up in the order of ranks
        in fp32 (fp64 for fp64) and rounded once. Its gradient is taken to be one value that every rank has, as in
        tensor parallelism: going back nothing is summed.
    """
    return _product("gemv_all_reduce", x, w, group, transport)


def all_gather_matmul(x: torch.Tensor, w: torch.Tensor, *, group: Any = None, transport: str = AUTO) -> torch.Tensor:
    """The product of all ranks' rows of x with this rank's w: x [m, k], w [n, k] -> [world * m, n]."""
    return _product("all_gather_matmul", x, w, group, transport)


def matmul_reduce_scatter(
    x: torch.Tensor, w: torch.Tensor, *, group: Any = None, transport: str = AUTO
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of x @ w.T: x [m, k], w [n, k] -> [m / world, n]. Sums are those of
    `gemv_all_reduce`."""
    return _product("matmul_reduce_scatter", x, w, group, transport)


def _product(op: str, x: Any, w: Any, group: Any, transport: str) -> torch.Tensor:
    if _is_traced():
        return getattr(_ops, op)(x, w, name_of(group), transport)  # type: ignore[no-any-return]
    ranks, traced = named(name_of(group)), _wants_gradients(x, w)
    if not traced and (found := quick.run(ranks, op, x, w, transport)) is not None:
        return found
    make = getattr(calls, op)
    if traced:
        run.checked(ranks, lambda n: make(x, w, n), transport)
        return getattr(_ops, op)(x, w, name_of(group), transport)  # type: ignore[no-any-return]
    return run.run(ranks, lambda n: make(x, w, n), transport)


def embedding_all_to_all(
    weights: Sequence[torch.Tensor],
    values: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | None = None,
    mode: str = "sum",
    per_sample_weights: torch.Tensor | None = None,
    num_tables: int = -1,
    optimizer: str = "",
    state: Sequence[torch.Tensor] = (),
    lr: float = 0.01,
    eps: float = 1e-8,
    group: Any = None,
    transport: str = AUTO,
) -> torch.Tensor:
    """Pools this rank's tables for the samples of all ranks; each rank gets all tables for its own samples.

    Args:
        weights: this rank's tables, [rows, dim] each, of one dim and dtype.
        values: row numbers, bag after bag; the bags of the whole batch for the first table, then for the next. With
            `lengths` that is a TorchRec KeyedJaggedTensor: `kjt.values()`, `lengths=kjt.lengths()`.
        offsets: where each bag begins, and the end: tables * batch + 1 numbers. Or `lengths`, of each bag.
        mode: "sum" or "mean".
        per_sample_weights: a factor for each value, with mode "sum".
        num_tables: of all ranks together, the same on each of them; needed under `torch.compile` only.
        optimizer: "" for sparse gradients of the tables; "sgd" or "rowwise_adagrad" to update the tables in place
            when gradients come, with `lr`, `eps` and `state`, one [rows] fp32 tensor per table. No gradient as large
            as a table is ever made.

    Returns:
        [batch / world, num_tables, dim], tables in the order of ranks.
    """
    tables, moments = _listed(weights), _listed(state)

    def make(n: int) -> calls.EmbeddingAllToAll:
        call = calls.embedding_all_to_all(
            tables, values, offsets, lengths, None, mode, per_sample_weights, n, num_tables
        )  # fmt: skip
        _optimizer(optimizer, moments, tables, lr=lr, eps=eps)
        return call

    if _is_traced():
        if offsets is None:
            assert lengths is not None
            offsets = torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))
    else:
        ranks = named(name_of(group))
        if not _wants_gradients(*(tables if isinstance(tables, list) else ()), per_sample_weights):
            found = None
            is_plain = type(optimizer) is str and not optimizer and type(moments) is list and not moments
            if per_sample_weights is lengths is None and is_plain and type(lr) is type(eps) is float:
                found = quick.run_lookup(ranks, tables, values, offsets, mode, num_tables, transport)
            if found is None:
                found = run.run(ranks, make, transport)
            if num_tables >= 0 and found.shape[1] != num_tables:
                raise ValueError(f"num_tables is {num_tables}, the ranks have {found.shape[1]} tables together")
            return found
        call, _ = run.checked(ranks, make, transport)
        offsets, lr, eps = call.offsets, float(lr), float(eps)
    return _ops.embedding_all_to_all(  # type: ignore[no-any-return]
        tables, values, offsets, per_sample_weights, mode, num_tables, moments, optimizer, lr, eps, name_of(group),
        transport,
    )  # fmt: skip


def _is_traced() -> bool:
    """Whether torch's dispatcher must see the call: under its compiler, or a mode such as FakeTensorMode."""
    return torch.compiler.is_compiling() or bool(_num_modes())


#: A private name of torch's: without it calls go the short way under modes too.
_num_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)


def _listed(tensors: Any) -> Any:
    """As a list; what can't be one is left to the checks, which tell the other ranks."""
    return list(tensors) if isinstance(tensors, Iterable) and not isinstance(tensors, torch.Tensor) else tensors


def _optimizer(name: str, state: Any, tables: Sequence[torch.Tensor], **numbers: Any) -> None:
    for which, given in numbers.items():
        try:
            right = isinstance(given, (Real, torch.Tensor)) and math.isfinite(float(given))
        except (OverflowError, RuntimeError, ValueError):  # too large; a tensor of several numbers
            right = False
        if not right:
            raise ValueError(f"{which} is a finite number, not {given!r:.80}")
    if not isinstance(name, str):
        raise TypeError(f"optimizer is a text, not {name!r:.80}")
    if not isinstance(state, list) or not all(isinstance(s, torch.Tensor) for s in state):
        raise TypeError(f"state is a list of tensors, not {state!r:.80}")
    if name not in ("", SGD, ADAGRAD):
        raise ValueError(f"optimizer is '', {SGD!r} or {ADAGRAD!r}, not {name!r}")
    wanted = len(tables) if name == ADAGRAD else 0
    if len(state) != wanted:
        raise ValueError(f"optimizer {name!r} needs {wanted} tensors of state, not {len(state)}")
    for t, (s, w) in enumerate(zip(state, tables, strict=False)):
        if s.shape != w.shape[:1] or s.dtype is not torch.float32:
            raise ValueError(f"state[{t}] must be float32 [{w.shape[0]}], not {s.dtype} {tuple(s.shape)}")
    if name and torch.is_grad_enabled() and not any(t.requires_grad for t in tables):
        raise ValueError(f"optimizer {name!r} updates tables when their gradient comes, and none of them requires one")


def check(group: Any = None, *, synchronize: bool = False) -> None:
    """Raises what earlier calls of this rank found out after they had returned; returns at once if they found nothing.

    On a GPU a call returns before its kernel has ended. If a peer dies or is late, the kernel ends and its result is
    void, though it looks like any other: the next call of the group raises, or this one. Call it, with `synchronize`,
    before a result that no later call vouches for is used.

    Args:
        synchronize: wait for the GPU first; otherwise only kernels that have ended by now are heard. Kernels that wait
            for a dead or a late peer end too.

    Raises:
        PeerError, Timeout: a rank died, or made no progress; the group is broken.
        IndexError: a row number of `embedding_all_to_all` was out of range; nothing was pooled for it.
    """
    run.check(named(name_of(group)), synchronize=synchronize)


#: What each operator takes at least.
_TWO = dict.fromkeys(("gemm_all_to_all", "gemv_all_reduce", "all_gather_matmul", "matmul_reduce_scatter"), "x and w")
_TWO["embedding_all_to_all"] = "weights and values"


def explain(op: str, *arguments: Any, group: Any = None, transport: str = AUTO, **keywords: Any) -> Choice:
    """What a call would run and why, without running it: `explain("gemm_all_to_all", x, w)`. Other ranks take no
    part."""
    from dovetail.ops.choose import transport_for
    from dovetail.ops.run import backend_of_call

    ranks = named(name_of(group))
    if op in _TWO and len(arguments) < 2:
        raise TypeError(f"{op} takes {_TWO[op]}, of which {len(arguments)} came")
    if op == "gemm_all_to_all":
        x, w, *splits = arguments
        given = [*splits, None, None][:2]
        receive = keywords.get("output_splits", given[0])
        call: calls.Call = calls.gemm_all_to_all(x, w, receive, keywords.get("input_splits", given[1]), ranks.size)
    elif op == "embedding_all_to_all":
        weights, values, *rest = arguments
        offsets = rest[0] if rest else keywords.get("offsets")
        call = calls.embedding_all_to_all(
            weights, values, offsets, keywords.get("lengths"), None, keywords.get("mode", "sum"),
            keywords.get("per_sample_weights"), ranks.size, keywords.get("num_tables", -1),
        )  # fmt: skip
    elif op in _TWO:
        call = getattr(calls, op)(*arguments, ranks.size)
    else:
        raise ValueError(f"there are the operators {', '.join(_TWO)}, not {op!r}")
    return transport_for(ranks, call, transport, backend_of_call(call))
