"""AdamW with its state on the host, fetched, updated and stored back parameter by parameter.

Run: python examples/09_optimizer_offload.py, on a GPU with --backend cuda. The window has three slots: one state
arrives, one is updated, one goes back.
"""

from __future__ import annotations

import torch
from side_by_side import arguments, compare, in_turns, report, shelf_on

LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01
State = dict[str, torch.Tensor]


def update(state: State, grad: torch.Tensor, step: int) -> None:
    """One step of torch.optim.AdamW, in place."""
    weight, m, v = state["weight"], state["m"], state["v"]
    weight.mul_(1 - LR * DECAY)
    m.lerp_(grad, 1 - BETA1)
    v.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
    scale = (v.sqrt() / (1 - BETA2**step) ** 0.5).add_(EPS)
    weight.addcdiv_(m, scale, value=-LR / (1 - BETA1**step))


def main() -> None:
    cpu, cuda = {"width": 256, "parameters": 8, "steps": 3}, {"width": 4096, "parameters": 24, "steps": 3}
    args = arguments(__doc__ or "", cpu, cuda)
    device = args.backend
    made = torch.Generator(device).manual_seed(1)
    matrix, vector = (args.width, args.width), (args.width,)
    shapes = [vector if n % 4 == 3 else matrix for n in range(args.parameters)]
    weights = [torch.randn(shape, generator=made, device=device) for shape in shapes]
    grads = [torch.randn(w.shape, generator=made, device=device) for w in weights]
    model = [w.bfloat16() for w in weights]  # what the forward pass would use: it stays on the device
    items = {n: {k: torch.empty(w.shape, device="meta") for k in ("weight", "m", "v")} for n, w in enumerate(weights)}
    own = {k: torch.zeros(matrix, device=device) for k in ("weight", "m", "v")}
    with shelf_on(device, items, slots=3) as shelf:
        for loan in shelf.walk(items, store=True):
            for name, t in loan.tensors.items():
                t.copy_(weights[loan.key]) if name == "weight" else t.zero_()

        def offloaded(step: int, ahead: int | None = None) -> None:
            for loan in shelf.walk(items, ahead=ahead, store=True):
                update(loan.tensors, grads[loan.key] * step, step)
                model[loan.key].copy_(loan.tensors["weight"])

        def compute() -> None:  # with a state that is on the device anyway
            for n, grad in enumerate(grads):
                state = {k: t.view(-1)[: grad.numel()].view_as(grad) for k, t in own.items()}
                update(state, grad * 1, 1)
                model[n].copy_(state["weight"])

        def copy() -> None:
            for _ in shelf.walk(items, store=True):
                pass

        plain = [torch.nn.Parameter(w.clone()) for w in weights]
        adam = torch.optim.AdamW(plain, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, foreach=False)
        for step in range(1, args.steps + 1):
            offloaded(step)
            for p, grad in zip(plain, grads, strict=True):
                p.grad = grad * step
            adam.step()
        states = [shelf.read(n) for n in items]
        for name, key in (("weight", None), ("m", "exp_avg"), ("v", "exp_avg_sq")):
            found = torch.cat([state[name].flatten() for state in states])
            wanted = torch.cat([(adam.state[p][key] if key else p.detach()).flatten().cpu() for p in plain])
            compare(f"{name} after {args.steps} steps", found, wanted)
        work = {"without": lambda: offloaded(1, 0), "with": lambda: offloaded(1), "compute": compute, "copy": copy}
        times = in_turns(device, args.repeats, work)
        size_bytes = sum(3 * w.nbytes for w in weights)
        report(device, times, size_bytes, len(items), "parameter")


if __name__ == "__main__":
    main()
