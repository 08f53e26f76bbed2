"""Our slot allocator under vLLM's CPU offloading manager: its policy, events and counts stay."""

from __future__ import annotations

from typing import Any

from dovetail.errors import NotSupported
from dovetail.kv.vllm.runs import FreeRuns

#: What vLLM calls a chunk: since 0.30 or later, and in 0.29.
_NOUNS = ("chunks", "blocks")


def use_runs(manager: Any) -> None:
    """Makes a new manager take chunks from `FreeRuns`. Once it has been done, does nothing.

    The manager counts chunks that were never used apart from its free list; here all of them are in the list.

    Raises:
        NotSupported: a manager with other insides.
    """
    if isinstance(getattr(manager, "_free_list", None), FreeRuns):
        return
    noun = next((n for n in _NOUNS if hasattr(manager, f"_num_allocated_{n}")), None)
    inside = [f"_num_{noun}", f"_allocate_{noun}", "_free_list"]
    if noun is None or not all(hasattr(manager, name) for name in inside):
        raise NotSupported(
            f"the pool `dovetail` does not know the insides of {type(manager).__name__} of this vLLM: "
            "leave the key `pool` out"
        )
    total = getattr(manager, f"_num_{noun}")
    allocate, reset = getattr(manager, f"_allocate_{noun}"), manager.reset_cache
    runs = FreeRuns(total)

    def allocate_runs(keys: list[Any]) -> Any:
        runs.reserve(len(keys))
        return allocate(keys)

    def reset_cache() -> None:
        reset()
        setattr(manager, f"_num_allocated_{noun}", total)

    manager._free_list = runs
    setattr(manager, f"_num_allocated_{noun}", total)
    setattr(manager, f"_allocate_{noun}", allocate_runs)
    manager.reset_cache = reset_cache
