"""DLRM: embedding tables spread over ranks, pooled into the other ranks' memory, updated in place by row-wise Adagrad.

Run: python examples/12_dlrm.py. Every rank has tables of its own and the same dense layers as others; its tables are
pooled for the samples of all ranks. The twin does that as two calls: torch's lookup, then an all-to-all.
"""

from __future__ import annotations

import torch
from torch import nn

import dovetail
from dovetail.ops import EmbeddingAllToAll

TABLES, ROWS, DIM, DENSE = 3, 1000, 16, 13  # tables of each rank
BATCH, LOOKUPS, STEPS = 512, 4, 8  # samples of all ranks together; values of a bag at most


class Dlrm(nn.Module):
    """Dense features and pooled rows meet in the dot products of all pairs."""

    def __init__(self, group: dovetail.Group, transport: str) -> None:
        super().__init__()
        num = 1 + TABLES * group.size
        self.first, self.second = torch.triu_indices(num, num, 1)
        torch.manual_seed(0)  # dense layers are everybody's
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, DIM))
        self.top = nn.Sequential(nn.Linear(DIM + len(self.first), 64), nn.ReLU(), nn.Linear(64, 1))
        torch.manual_seed(1 + group.rank)  # tables are this rank's
        self.tables = EmbeddingAllToAll([ROWS] * TABLES, DIM, optimizer="rowwise_adagrad", lr=0.02, transport=transport)
        for table in self.tables.weights:
            table.data.mul_(0.1)

    def forward(self, dense: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        features = torch.cat([x[:, None], self.tables(values, lengths=lengths)], 1)
        pairs = (features @ features.mT)[:, self.first, self.second]
        return self.top(torch.cat([x, pairs], 1))[:, 0]


def samples(step: int, group: dovetail.Group) -> tuple[torch.Tensor, ...]:
    """This rank's samples (dense features, labels) and, for its tables, everybody's lookups."""
    made = torch.Generator().manual_seed(step)
    dense = torch.randn(BATCH, DENSE, generator=made)
    lengths = torch.randint(0, LOOKUPS + 1, (group.size, TABLES * BATCH), generator=made)
    values = [torch.randint(0, ROWS, (int(n.sum()),), generator=made) for n in lengths]
    clicked = (dense.sum(1) + lengths[0, :BATCH] > 2).float()
    mine = slice(group.rank * BATCH // group.size, (group.rank + 1) * BATCH // group.size)
    return dense[mine], clicked[mine], values[group.rank], lengths[group.rank]


def train(transport: str) -> list[float]:
    """What each rank does: the loss of every step, over all ranks."""
    torch.set_num_threads(1)  # ranks share the cores
    model = Dlrm(group := dovetail.init(), transport)
    dense_layers, losses = [*model.bottom.parameters(), *model.top.parameters()], []
    for step in range(STEPS):
        dense, clicked, *lookups = samples(step, group)
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, *lookups), clicked, reduction="sum") / BATCH
        loss.backward()  # the tables are a step further after it
        total = torch.cat([loss.detach()[None], *(p.grad.flatten() for p in dense_layers)])
        dovetail.all_reduce(total)
        for p, grad in zip(dense_layers, total[1:].split([p.numel() for p in dense_layers]), strict=True):
            p.data.add_(grad.view_as(p), alpha=-0.5)
            p.grad = None
        losses.append(total[0].item())
    return losses


def main() -> None:
    fused, twin = dovetail.launch(lambda: [train("auto"), train("unfused")], ranks=2)[0]
    for step, (a, b) in enumerate(zip(fused, twin, strict=True)):
        print(f"step {step}: loss {a:.5f} fused, {b:.5f} as two calls")
    torch.testing.assert_close(torch.tensor(fused), torch.tensor(twin))
    print(f"{2 * TABLES} tables of {ROWS} rows learned the same, and no gradient was as large as a table")


if __name__ == "__main__":
    main()
