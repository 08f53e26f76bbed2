"""Whether logits are right: against a whole computation, and against the same steps without a fetch in flight.

A prompt whose prefix is fetched is computed in two steps, with other kernels than a whole one: its logits differ from
those by rounding. From the same two steps they must not differ at all, if the kernels repeat themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

#: The largest difference that rounding explains, in standard deviations of the logits: whole, and same steps.
_LIMITS = {"float32": (1e-2, 1e-4), "bfloat16": (0.5, 0.02)}


@dataclass(slots=True)
class Likeness:
    """Of all results of one contender."""

    dtype: str
    largest: float = 0.0  #: difference from a whole computation, in standard deviations of its logits
    largest_stepped: float = 0.0  #: the same from the two steps
    same_bits: bool = True  #: as the two steps
    same_token: bool = True  #: the most likely one is that of a whole computation
    finite: bool = True

    def add(self, logits: torch.Tensor, whole: torch.Tensor, stepped: torch.Tensor) -> None:
        """One more result."""
        scale = whole.std().item()
        self.finite &= bool(torch.isfinite(logits).all())
        self.largest = max(self.largest, (logits - whole).abs().max().item() / scale)
        self.largest_stepped = max(self.largest_stepped, (logits - stepped).abs().max().item() / scale)
        self.same_bits &= torch.equal(logits, stepped)
        self.same_token &= bool(logits.argmax() == whole.argmax())

    def add_text(self, text: torch.Tensor, wanted: torch.Tensor, logits: torch.Tensor, whole: torch.Tensor) -> None:
        """What followed a result: [tokens, 2], the logit and the number of each token.

        They are compared with those of a whole computation as long as what is before them is the same.
        """
        self.finite &= bool(torch.isfinite(text).all())
        alike, scale = bool(logits.argmax() == whole.argmax()), whole.std().item()
        for (logit, token), (right, like) in zip(text.tolist(), wanted.tolist(), strict=True):
            if not alike:
                return
            self.largest = max(self.largest, abs(logit - right) / scale)
            alike = token == like

    @property
    def right(self) -> bool:
        """True if nothing but rounding can be the reason for a difference."""
        from_whole, from_steps = _LIMITS[self.dtype]
        return self.finite and self.largest <= from_whole and self.largest_stepped <= from_steps

    def row(self) -> dict[str, Any]:
        """Its part of a row."""
        return {
            "logits_diff": self.largest if self.finite else None,
            "logits_diff_same_steps": self.largest_stepped if self.finite else None,
            "same_bits": self.same_bits, "same_token": self.same_token, "correct": self.right,
        }  # fmt: skip
