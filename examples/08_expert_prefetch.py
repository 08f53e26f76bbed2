"""Experts that arrive while the shared part of a layer computes; the window keeps those that were used lately.

Run: python examples/08_expert_prefetch.py, on a GPU with --backend cuda. The router's choice is known before attention,
so the experts are fetched first and joined last. Here it chooses for a whole step, by what its tokens are about.
"""

from __future__ import annotations

import torch
from side_by_side import arguments, compare, current_stream, in_turns, report, shelf_on
from stack import Weights, layer, layer_shapes, mlp, normed, random_weights, without_values

CHOSEN, TOPICS = 4, 16  # experts of a step; what steps are about


@torch.no_grad()
def main() -> None:
    cpu = {"experts": 16, "slots": 8, "width": 128, "hidden": 256, "tokens": 64, "steps": 12}
    cuda = {"experts": 32, "slots": 14, "width": 4096, "hidden": 4096, "tokens": 4096, "steps": 24}
    args = arguments(__doc__ or "", cpu, cuda)
    device, width, dtype = args.backend, args.width, torch.bfloat16 if args.backend == "cuda" else torch.float32
    always = random_weights(0, layer_shapes(width), device, dtype)
    route = random_weights(1, {"topics": (TOPICS, width), "router": (width, args.experts)}, device, dtype)
    about = torch.randint(TOPICS, (args.steps,), generator=torch.Generator().manual_seed(1)).tolist()
    inputs = [0.1 * torch.randn(1, args.tokens, width, device=device, dtype=dtype) + route["topics"][n] for n in about]
    shapes = {"up": (width, args.hidden), "down": (args.hidden, width)}

    def choose(x: torch.Tensor) -> list[int]:
        return sorted((x[0].mean(0) @ route["router"]).topk(CHOSEN).indices.tolist())

    def experts(chosen: list[Weights], x: torch.Tensor) -> torch.Tensor:
        h = normed(x)
        return x + sum(mlp(h, **w) for w in chosen) / CHOSEN

    def plain(x: torch.Tensor) -> torch.Tensor:
        return experts([random_weights(2 + n, shapes, device, dtype) for n in choose(x)], layer(always, x))

    items = {n: without_values(shapes, dtype) for n in range(args.experts)}
    with shelf_on(device, items, args.slots) as shelf:
        for loan in shelf.walk(items, store=True):
            for name, t in random_weights(2 + loan.key, shapes, device, dtype).items():
                loan.tensors[name].copy_(t)

        def step(x: torch.Tensor, early: bool, same: list[int] | None = None) -> torch.Tensor:
            chosen = choose(x)
            loans = shelf.fetch_many(same or chosen) if early else {}
            y = layer(always, x)
            loans = loans or shelf.fetch_many(same or chosen, after=current_stream(device))
            for loan in loans.values():
                loan.join()
            y = experts([loan.tensors for loan in loans.values()], y)
            for loan in loans.values():
                loan.done()
            return y

        def copy() -> None:
            for chosen in wanted:
                for loan in shelf.fetch_many(chosen).values():
                    loan.done()

        compare("all steps", torch.cat([step(x, True) for x in inputs]), torch.cat([plain(x) for x in inputs]))
        wanted, before = [choose(x) for x in inputs], shelf.stats()
        copy()
        after = shelf.stats()
        hits, misses = after.hits - before.hits, after.misses - before.misses
        print(f"of {hits + misses} experts asked for, {hits} were in the window of {args.slots}")
        work = {
            "without": lambda: [step(x, early=False) for x in inputs],
            "with": lambda: [step(x, early=True) for x in inputs],
            "compute": lambda: [step(x, early=True, same=wanted[-1]) for x in inputs],
            "copy": copy,
        }
        times = in_turns(device, args.repeats, work)
        report(device, times, after.fetched_bytes - before.fetched_bytes, args.steps, "step")


if __name__ == "__main__":
    main()
