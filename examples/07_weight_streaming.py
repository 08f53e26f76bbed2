"""A stack whose weights do not fit: layer i + 1 arrives while layer i computes.

Run: python examples/07_weight_streaming.py, on a GPU with --backend cuda. The window has two slots: one layer computes,
the next one is under way.
"""

from __future__ import annotations

import torch
from side_by_side import arguments, compare, in_turns, report, shelf_on
from stack import layer, layer_shapes, random_weights, without_values


@torch.no_grad()
def main() -> None:
    cpu = {"layers": 6, "width": 128, "sequences": 2, "length": 64}
    args = arguments(__doc__ or "", cpu, {"layers": 12, "width": 4096, "sequences": 12, "length": 1024})
    dtype = torch.bfloat16 if args.backend == "cuda" else torch.float32
    shapes, order = layer_shapes(args.width), range(args.layers)
    items = {n: without_values(shapes, dtype) for n in order}
    x = torch.randn(args.sequences, args.length, args.width, dtype=dtype, device=args.backend)
    own = random_weights(0, shapes, args.backend, dtype)
    plain = x
    for n in order:
        plain = layer(random_weights(n, shapes, args.backend, dtype), plain)
    with shelf_on(args.backend, items, slots=2) as shelf:
        for loan in shelf.walk(order, store=True):  # weights reach the host through the window
            for name, t in random_weights(loan.key, shapes, args.backend, dtype).items():
                loan.tensors[name].copy_(t)

        def forward(ahead: int) -> torch.Tensor:
            y = x
            for loan in shelf.walk(order, ahead=ahead):
                y = layer(loan.tensors, y)
            return y

        def compute() -> None:  # with weights that are on the device anyway
            y = x
            for _ in order:
                y = layer(own, y)

        def copy() -> None:
            for _ in shelf.walk(order):
                pass

        compare("the stack's output", forward(1), plain)
        work = {"without": lambda: forward(0), "with": lambda: forward(1), "compute": compute, "copy": copy}
        times = in_turns(args.backend, args.repeats, work)
        size_bytes = sum(t.nbytes for t in items[0].values()) * args.layers
        report(args.backend, times, size_bytes, args.layers, "layer")


if __name__ == "__main__":
    main()
