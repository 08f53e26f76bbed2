"""One repair of Triton's interpreter, where that is in use: `range` over a value that is known only at run time.

The interpreter keeps a scalar as an array of one element, and NumPy 2.4 no longer makes an `int` of such an array:
loops like `for k in range(0, K, BK)` then fail under TRITON_INTERPRET=1. Nothing is touched otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def mend() -> None:
    """Makes scalars of the interpreter usable as bounds of a loop. Does nothing where they are."""
    import triton

    if not triton.knobs.runtime.interpret or _works():
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "mended", False):
        return

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    mended.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = mended


def _works() -> bool:
    try:
        return int(np.ones(1, np.int32)) == 1  # type: ignore[call-overload,no-any-return,unused-ignore]
    except TypeError:
        return False
