"""A Llama of a few kilobytes with random weights, and ways to look at what it says."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from dovetail.kv.plain import CpuMover
from dovetail.kv.planner import Direction, Table

WORDS = 128


def llama(num_layers: int = 4, seed: int = 3, **given: Any) -> Any:
    """Weights are large, so that every token of a prompt shows in the logits."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers, num_attention_heads=4,
        initializer_range=0.2, **{"num_key_value_heads": 2, "max_position_embeddings": 4096, **given},
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def prompt(count: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    return torch.randint(0, WORDS, (batch, count), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, ids: torch.Tensor, cache: Any = None, new: int = 20, **options: Any) -> Any:
    """Greedy, with the logits of every step."""
    return model.generate(
        ids, past_key_values=DynamicCache(config=model.config) if cache is None else cache, max_new_tokens=new,
        do_sample=False, return_dict_in_generate=True, output_logits=True, pad_token_id=0, eos_token_id=None, **options,
    )  # fmt: skip


def same(left: Any, right: Any) -> bool:
    """Tokens, and the bits of the logits."""
    logits = zip(left.logits, right.logits, strict=True)
    return torch.equal(left.sequences, right.sequences) and all(torch.equal(a, b) for a, b in logits)


def differ(left: Any, right: Any) -> float:
    """The largest difference of logits; infinite if one is no number."""
    pairs = zip(left.logits, right.logits, strict=True)
    return float(max((a - b).abs().nan_to_num(float("inf")).max().item() for a, b in pairs))


class LateMover(CpuMover):
    """Moves nothing until somebody waits.

    `log` has (direction, number) of what has landed, in order; `afters` has (direction, `after`) of what was submitted.
    """

    def __init__(self, cache: Any, pieces: Any) -> None:
        super().__init__(cache, pieces)
        self.log: list[tuple[str, int]] = []
        self.afters: list[tuple[str, tuple[int, ...]]] = []
        self._number = 0

    def submit(
        self, direction: Direction | str, table: Table, path: Any = "cpu", *, after: Any = (), beside: Any = None
    ) -> Any:
        self._number += 1
        self.afters.append((str(direction), tuple(after)))
        return LateTransfer(self, Direction(direction), table, self._number - 1)

    def land(self, direction: Direction, table: Table, number: int) -> None:
        super().submit(direction, table)
        self.log.append((str(direction), number))


class LateTransfer:
    def __init__(self, mover: LateMover, direction: Direction, table: Table, number: int) -> None:
        self._mover, self._what, self._over = mover, (direction, table, number), False

    def is_over(self) -> bool:
        return self._over

    def wait(self, timeout_s: float = 60.0) -> None:
        if not self._over:
            self._over = True
            self._mover.land(*self._what)
