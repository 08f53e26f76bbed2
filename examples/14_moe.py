"""A mixture of experts: tokens go to their expert's rank, and its last product's rows straight back into their memory.

Run: python examples/14_moe.py. The router decides how many tokens go where, so no two splits are equal: the dispatch is
`all_to_all_single`, the combine `ExpertParallelLinear`. Result and gradients are those of one process with all experts.
"""

from __future__ import annotations

import torch
from torch.nn import functional as fn

import dovetail
from dovetail.ops import ExpertParallelLinear

TOKENS, WIDTH, HIDDEN, RANKS = 96, 32, 64, 2  # tokens of each rank; one expert per rank


class Dispatch(torch.autograd.Function):
    """Rows to their experts; going back, their gradients to the tokens."""

    @staticmethod
    def forward(ctx, rows, receive, send):
        ctx.splits = send, receive
        dovetail.all_to_all_single(out := rows.new_empty(sum(receive), WIDTH), rows, receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Dispatch.forward(ctx, grad, *ctx.splits), None, None


def inputs() -> tuple[torch.Tensor, ...]:
    """Everybody's: tokens, router, the experts' two layers. The router likes some experts better than others."""
    made = torch.Generator().manual_seed(3)
    shapes = (RANKS, TOKENS, WIDTH), (RANKS, WIDTH), (RANKS, HIDDEN, WIDTH), (RANKS, WIDTH, HIDDEN)
    x, router, up, down = (torch.randn(s, generator=made, dtype=torch.float64) / s[-1] ** 0.5 for s in shapes)
    return x + 0.1 * router[0], 4 * router, up, down


def layer(transport: str) -> tuple[list[int], list[torch.Tensor]]:
    """What each rank does: how many of its tokens went to each expert; the result and the gradients."""
    rank, (x, router, up, full) = dovetail.init().rank, inputs()
    x, router, up = (t.requires_grad_() for t in (x[rank], router, up[rank]))
    down = ExpertParallelLinear(HIDDEN, WIDTH, dtype=full.dtype, transport=transport)
    down.weight.data = full[rank]
    gate, expert = (x @ router.t()).softmax(1).max(1)
    order = expert.argsort(stable=True)
    send = expert.bincount(minlength=RANKS)
    receive = torch.empty_like(send)
    dovetail.all_to_all_single(receive, send)
    rows = Dispatch.apply(x[order], receive.tolist(), send.tolist())
    back = down(fn.gelu(rows @ up.t()), send, receive)  # grouped by expert, as `order` has it
    y = gate[:, None] * torch.zeros_like(x).index_copy(0, order, back)
    y.square().sum().backward()
    dovetail.all_reduce(router.grad)
    return send.tolist(), [y.detach(), x.grad, up.grad, down.weight.grad, router.grad]


def dense() -> list[list[torch.Tensor]]:
    """The same in one process: every expert for every token, and the router's choice of them."""
    x, router, up, down = (t.requires_grad_() for t in inputs())
    gate, expert = (x @ router.t()).softmax(-1).max(-1)
    chosen = fn.one_hot(expert, RANKS).to(x)
    y = gate[..., None] * sum(fn.gelu(x @ up[e].t()) @ down[e].t() * chosen[..., e, None] for e in range(RANKS))
    y.square().sum().backward()
    return [[y[r].detach(), x.grad[r], up.grad[r], down.grad[r], router.grad] for r in range(RANKS)]


def main() -> None:
    both = dovetail.launch(lambda: (layer("auto"), layer("unfused")), ranks=RANKS)
    for ((sent, ours), (_, theirs)), wanted in zip(both, dense(), strict=True):
        print(f"{TOKENS} tokens: {' and '.join(map(str, sent))} to the experts of rank 0 and 1")
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(ours, wanted)
    print("result and gradients: fused, as two calls and in one process with all experts, the same")


if __name__ == "__main__":
    main()
