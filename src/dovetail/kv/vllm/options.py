"""What can be set under the key `dovetail` of vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from dovetail.kv.choose import Path
from dovetail.kv.memory import PIECE_BYTES

KEY = "dovetail"
_Choice = TypeVar("_Choice", bound=StrEnum)


class Pool(StrEnum):
    """Who hands out places on the host."""

    VLLM = "vllm"  #: vLLM's free list: the place that was given back last goes first
    DOVETAIL = "dovetail"  #: our allocator: a store gets as few contiguous runs as can be


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Validated when it is built; an unknown key is an error."""

    path: Path = Path.AUTO  #: how blocks are moved
    pool: Pool = Pool.VLLM
    piece_bytes: int = PIECE_BYTES  #: host memory is mapped and pinned in pieces of at most this

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> Options:
        """From vLLM's extra config, whose other keys are vLLM's.

        Raises:
            ValueError: an unknown key or value.
        """
        given = extra_config.get(KEY, {})
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise ValueError(f"`{KEY}` in kv_connector_extra_config is a table of {', '.join(names)}, not {given!r}")
        piece_bytes = given.get("piece_bytes", PIECE_BYTES)
        if not isinstance(piece_bytes, int) or piece_bytes < 1:
            raise ValueError(f"`{KEY}`: piece_bytes is a number of bytes, not {piece_bytes!r}")
        path = _one_of(Path, "path", given.get("path", Path.AUTO))
        pool = _one_of(Pool, "pool", given.get("pool", Pool.VLLM))
        return cls(path=path, pool=pool, piece_bytes=piece_bytes)


def _one_of(kind: type[_Choice], name: str, given: Any) -> _Choice:
    try:
        return kind(given)
    except ValueError:
        raise ValueError(f"`{KEY}`: {name} is one of {', '.join(kind)}, not {given!r}") from None
