"""The operators as `torch.ops.dovetail.*`: schema, shapes for tracing, gradients.

Groups and transports are strings here, so that a compiled graph can hold them. The gradient of each operator is the one
that belongs to it, and most are operators of this package themselves: what all-gathers going forward reduce-scatters
going back. Registered when this module is imported, once.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.errors import NotSupported
from dovetail.ops import backward, calls, choose, run, unfused
from dovetail.ops.names import named

_lib: Any = torch.library.Library("dovetail", "DEF")  # type: ignore[no-untyped-call]
_ops = torch.ops.dovetail


def _define(schema: str, impl: Any, fake: Any) -> None:
    name = schema.partition("(")[0]
    _lib.define(schema)
    torch.library.impl(f"dovetail::{name}", ("CPU", "CUDA"), impl, lib=_lib)
    torch.library.register_fake(f"dovetail::{name}", fake, lib=_lib)


# --- GEMM + all-to-all -----------------------------------------------------------------------------------------------


def _gemm_all_to_all(
    x: Any, w: Any, output_splits: list[int] | None, input_splits: list[int] | None, group: str, transport: str
) -> torch.Tensor:
    return run.run(named(group), lambda n: calls.gemm_all_to_all(x, w, output_splits, input_splits, n), transport)


def _gemm_all_to_all_fake(
    x: torch.Tensor, w: torch.Tensor, output_splits: list[int] | None, input_splits: list[int] | None, group: str,
    transport: str,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((x.shape[0] if output_splits is None else sum(output_splits), w.shape[0]))


def _gemm_all_to_all_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, ctx.receive, ctx.send, ctx.group, _ = inputs
    ctx.save_for_backward(x, w)


def _all_to_all_rows_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    y, _, ctx.receive, ctx.send, ctx.group = inputs
    ctx.rows = y.shape[0]


def _all_to_all_rows_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _ops._all_to_all_rows(grad.contiguous(), ctx.rows, ctx.send, ctx.receive, ctx.group), *[None] * 4


def _all_gather_rows_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.group = inputs


def _all_gather_rows_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Every rank's part of this rank's rows, added up."""
    parts = _ops._all_to_all_rows(grad.contiguous(), grad.shape[0], None, None, ctx.group)
    return parts.unflatten(0, (named(ctx.group).size, -1)).sum(0), None


def _no_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Nothing is kept."""


def _embedding_grads_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    raise NotSupported("embedding_all_to_all has no second derivatives: its gradient is not a differentiable function")


def _gemm_all_to_all_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    needs = ctx.needs_input_grad
    y = _ops._all_to_all_rows(grad.contiguous(), x.shape[0], ctx.send, ctx.receive, ctx.group)
    return y @ w if needs[0] else None, y.t() @ x if needs[1] else None, None, None, None, None


def _all_to_all_rows(
    y: torch.Tensor, rows: int, output_splits: list[int] | None, input_splits: list[int] | None, group: str
) -> torch.Tensor:
    splits = None if output_splits is None or input_splits is None else (tuple(output_splits), tuple(input_splits))
    return unfused.all_to_all_rows(named(group), y, y.new_empty((rows, *y.shape[1:])), splits)


def _all_to_all_rows_fake(
    y: torch.Tensor, rows: int, output_splits: list[int] | None, input_splits: list[int] | None, group: str
) -> torch.Tensor:
    return y.new_empty((rows, *y.shape[1:]))


# --- products with a shared inner dimension, or shared rows ----------------------------------------------------------


def _gemv_all_reduce(x: Any, w: Any, group: str, transport: str) -> torch.Tensor:
    return run.run(named(group), lambda n: calls.gemv_all_reduce(x, w, n), transport)


def _gemv_all_reduce_fake(x: torch.Tensor, w: torch.Tensor, group: str, transport: str) -> torch.Tensor:
    return x.new_empty((x.shape[0], w.shape[0]))


def _product_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, ctx.group, ctx.transport = inputs
    ctx.save_for_backward(x, w)


def _gemv_all_reduce_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The result is one value that every rank has, and so is its gradient: nothing is sent."""
    x, w = ctx.saved_tensors
    needs = ctx.needs_input_grad
    return grad @ w if needs[0] else None, grad.t() @ x if needs[1] else None, None, None


def _all_gather_matmul(x: Any, w: Any, group: str, transport: str) -> torch.Tensor:
    return run.run(named(group), lambda n: calls.all_gather_matmul(x, w, n), transport)


def _all_gather_matmul_fake(x: torch.Tensor, w: torch.Tensor, group: str, transport: str) -> torch.Tensor:
    return x.new_empty((x.shape[0] * named(group).size, w.shape[0]))


def _all_gather_matmul_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad = grad.contiguous()
    transport = _gradient_by(ctx.transport, "matmul_reduce_scatter", grad)
    to_x = _ops.matmul_reduce_scatter(grad, w.t().contiguous(), ctx.group, transport) if needs[0] else None
    to_w = grad.t() @ _ops._all_gather_rows(x, ctx.group) if needs[1] else None
    return to_x, to_w, None, None


def _matmul_reduce_scatter(x: Any, w: Any, group: str, transport: str) -> torch.Tensor:
    return run.run(named(group), lambda n: calls.matmul_reduce_scatter(x, w, n), transport)


def _matmul_reduce_scatter_fake(x: torch.Tensor, w: torch.Tensor, group: str, transport: str) -> torch.Tensor:
    return x.new_empty((x.shape[0] // named(group).size, w.shape[0]))


def _matmul_reduce_scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad = grad.contiguous()
    transport = _gradient_by(ctx.transport, "all_gather_matmul", grad)
    to_x = _ops.all_gather_matmul(grad, w.t().contiguous(), ctx.group, transport) if needs[0] else None
    to_w = _ops._all_gather_rows(grad, ctx.group).t() @ x if needs[1] else None
    return to_x, to_w, None, None


def _gradient_by(transport: str, op: str, grad: torch.Tensor) -> str:
    """The transport of a gradient: the one of the result, if the operator that makes the gradient has it."""
    has = choose.TRANSPORTS["cpu" if grad.device.type == "cpu" else "cuda"][op]  # those of hip are cuda's
    return transport if transport in has else "auto"


def _all_gather_rows(x: torch.Tensor, group: str) -> torch.Tensor:
    return unfused.gathered(named(group), x.contiguous())


def _all_gather_rows_fake(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty((x.shape[0] * named(group).size, *x.shape[1:]))


# --- pooled embeddings + all-to-all ----------------------------------------------------------------------------------


def _embedding_all_to_all(
    weights: list[torch.Tensor], values: Any, offsets: Any, per_sample_weights: Any, mode: str, num_tables: int,
    state: list[torch.Tensor], optimizer: str, lr: float, eps: float, group: str, transport: str,
) -> torch.Tensor:  # fmt: skip
    out = run.run(
        named(group),
        lambda n: calls.embedding_all_to_all(
            weights, values, offsets, None, None, mode, per_sample_weights, n, num_tables
        ),
        transport,
    )
    if num_tables >= 0 and out.shape[1] != num_tables:
        raise ValueError(f"num_tables is {num_tables}, the ranks have {out.shape[1]} tables together")
    return out


def _embedding_all_to_all_fake(
    weights: list[torch.Tensor], values: Any, offsets: Any, per_sample_weights: Any, mode: str, num_tables: int,
    state: list[torch.Tensor], optimizer: str, lr: float, eps: float, group: str, transport: str,
) -> torch.Tensor:  # fmt: skip
    if num_tables < 0:
        raise ValueError("give num_tables, of all ranks together, where the operator is traced")
    batch = (offsets.shape[0] - 1) // len(weights)
    return weights[0].new_empty((batch // named(group).size, num_tables, weights[0].shape[1]))


def _embedding_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    weights, values, offsets, scales, ctx.mode, _, state, ctx.optimizer, ctx.lr, ctx.eps, ctx.group, _ = inputs
    ctx.num, ctx.num_state = len(weights), len(state)
    ctx.has_scales = scales is not None
    # Tables that are updated in place are kept as they are, not as saved tensors: those must not change before a
    # backward pass, and the step of another call changes them.
    ctx.tables = [*weights, *state] if ctx.optimizer else []
    ctx.versions = _versions(weights) if ctx.optimizer and ctx.has_scales else None
    saved = [] if ctx.optimizer else weights
    ctx.save_for_backward(values, offsets, *([scales] if ctx.has_scales else []), *saved)


def _versions(tables: list[torch.Tensor]) -> list[int]:
    """What torch counts of changes in place; none if there are a compiler's stand-ins, for which nothing is counted."""
    if not all(type(t) is torch.Tensor or type(t) is torch.nn.Parameter for t in tables):
        return []
    return [-1 if t.is_inference() else t._version for t in tables]


def _embedding_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    values, offsets, *rest = ctx.saved_tensors
    scales = rest.pop(0) if ctx.has_scales else None
    kept = ctx.tables or rest
    weights, state = kept[: ctx.num], kept[ctx.num :]
    bags = _ops._embedding_grads(grad.contiguous(), ctx.num, ctx.group)  # [tables, batch, dim]
    bag_of = backward.bags_of(values, offsets)
    rows = backward.rows(bags, bag_of, offsets, ctx.mode, scales)
    to_scales = None
    if scales is not None and ctx.needs_input_grad[3]:
        if ctx.versions and (now := _versions(weights)) and ctx.versions != now:
            raise RuntimeError(
                "the gradient of per_sample_weights needs the tables as they were, and another call's step "
                f"({ctx.optimizer}) has changed one since: look a table up once in a pass, or update it afterwards"
            )
        to_scales = backward.scale_grads(bags, bag_of, values, offsets, weights)
    if ctx.optimizer:
        wanted = list(ctx.needs_input_grad[0])
        _ops._embedding_update(weights, state, wanted, rows, values, offsets, ctx.optimizer, ctx.lr, ctx.eps)
        to_weights: Any = [None] * ctx.num
    else:
        to_weights = backward.sparse(rows, values, offsets, weights)
    return (to_weights, None, None, to_scales, None, None, [None] * ctx.num_state, *[None] * 5)


def _embedding_grads(grad: torch.Tensor, tables: int, group: str) -> torch.Tensor:
    return backward.exchange(named(group), grad, tables)


def _embedding_grads_fake(grad: torch.Tensor, tables: int, group: str) -> torch.Tensor:
    return grad.new_empty((tables, grad.shape[0] * named(group).size, grad.shape[2]))


def _embedding_update(
    weights: list[torch.Tensor], state: list[torch.Tensor], wanted: list[bool], rows: torch.Tensor,
    values: torch.Tensor, offsets: torch.Tensor, optimizer: str, lr: float, eps: float,
) -> None:  # fmt: skip
    backward.update(weights, state, wanted, rows, values, offsets, optimizer, lr, eps)


def _embedding_update_fake(*_: Any) -> None:
    return None


_SPLITS = "int[]? output_splits, int[]? input_splits"
_HOW = "str group, str transport"
_define(
    f"gemm_all_to_all(Tensor x, Tensor w, {_SPLITS}, {_HOW}) -> Tensor", _gemm_all_to_all, _gemm_all_to_all_fake
)
_define(f"gemv_all_reduce(Tensor x, Tensor w, {_HOW}) -> Tensor", _gemv_all_reduce, _gemv_all_reduce_fake)
_define(f"all_gather_matmul(Tensor x, Tensor w, {_HOW}) -> Tensor", _all_gather_matmul, _all_gather_matmul_fake)
_define(
    f"matmul_reduce_scatter(Tensor x, Tensor w, {_HOW}) -> Tensor", _matmul_reduce_scatter, _matmul_reduce_scatter_fake
)
_define(
    "embedding_all_to_all(Tensor[] weights, Tensor values, Tensor offsets, Tensor? per_sample_weights, str mode, "
    "int num_tables, Tensor[] state, str optimizer, float lr, float eps, str group, str transport) -> Tensor",
    _embedding_all_to_all,
    _embedding_all_to_all_fake,
)
_define(
    f"_all_to_all_rows(Tensor y, int rows, {_SPLITS}, str group) -> Tensor", _all_to_all_rows, _all_to_all_rows_fake
)
_define("_all_gather_rows(Tensor x, str group) -> Tensor", _all_gather_rows, _all_gather_rows_fake)
_define("_embedding_grads(Tensor grad, int tables, str group) -> Tensor", _embedding_grads, _embedding_grads_fake)
_define(
    "_embedding_update(Tensor(a!)[] weights, Tensor(b!)[] state, bool[] wanted, Tensor rows, Tensor values, "
    "Tensor offsets, str optimizer, float lr, float eps) -> ()",
    _embedding_update,
    _embedding_update_fake,
)
for _name, _backward, _context in (
    ("gemm_all_to_all", _gemm_all_to_all_backward, _gemm_all_to_all_context),
    ("gemv_all_reduce", _gemv_all_reduce_backward, _product_context),
    ("all_gather_matmul", _all_gather_matmul_backward, _product_context),
    ("matmul_reduce_scatter", _matmul_reduce_scatter_backward, _product_context),
    ("embedding_all_to_all", _embedding_backward, _embedding_context),
    ("_all_to_all_rows", _all_to_all_rows_backward, _all_to_all_rows_context),
    ("_all_gather_rows", _all_gather_rows_backward, _all_gather_rows_context),
    ("_embedding_grads", _embedding_grads_backward, _no_context),
):
    torch.library.register_autograd(f"dovetail::{_name}", _backward, setup_context=_context, lib=_lib)
