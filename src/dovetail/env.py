"""The environment variables of Dovetail, and the only place that reads them.

Owns the table `VARIABLES` (docs/environment.md is checked against it) and one typed accessor per variable. A value is
read when its accessor is called, never at import; one that cannot be understood raises ``ValueError`` with the name,
what was given and what is allowed. An empty value counts as unset. Other modules take values from here and nowhere
else; what a value means is theirs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_LEVELS = ("debug", "info", "warning", "error")
_TRANSPORTS = ("auto", "unfused", "decomposed", "store", "dma")


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One row of the table: what a value looks like, what holds without one, and what it does."""

    kind: str
    default: str
    doc: str


VARIABLES: Mapping[str, Variable] = {
    "DOVETAIL_CHECK": Variable(
        kind="0 or 1",
        default="unset",
        doc="Prove plans before their first run: 1 all, the library's own too; 0 none. Unset: those of callers.",
    ),
    "DOVETAIL_CUDA_LIBRARY": Variable(
        kind="name or path of a library", default="libcuda.so.1", doc="The CUDA driver to load."
    ),
    "DOVETAIL_DISABLE": Variable(
        kind="0 or 1", default="0", doc="Turn every `auto` into the baseline, the caller's own process group."
    ),
    "DOVETAIL_ENGINES": Variable(
        kind="integer >= 1", default="1", doc="Runner threads per rank that advance the software DMA queues."
    ),
    "DOVETAIL_GPU_SEGMENT": Variable(
        kind="size (`256M`)",
        default="256M",
        doc="Device memory that the symmetric heap of a GPU takes at a time; a larger tensor gets its own segment.",
    ),
    "DOVETAIL_HEAP": Variable(
        kind="size (`64G`)",
        default="64G",
        doc="Address space reserved for the symmetric heap of each rank; memory is taken only when allocated.",
    ),
    "DOVETAIL_HIP_LIBRARY": Variable(
        kind="name or path of a library", default="libamdhip64.so", doc="The HIP runtime to load."
    ),
    "DOVETAIL_HSA_LIBRARY": Variable(
        kind="name or path of a library", default="libhsa-runtime64.so.1", doc="The ROCr runtime to load beside HIP."
    ),
    "DOVETAIL_LOG": Variable(
        kind="debug, info, warning or error", default="warning", doc="Level of the logger `dovetail`."
    ),
    "DOVETAIL_PROFILE": Variable(
        kind="path of a file",
        default="~/.cache/dovetail/profile.json",
        doc="The profile to load, and where `dovetail tune` saves one.",
    ),
    "DOVETAIL_RANK": Variable(
        kind="integer >= 0", default="unset", doc="Internal: set by a launcher, the rank of this process."
    ),
    "DOVETAIL_RENDEZVOUS": Variable(
        kind="token", default="unset", doc="Internal: set by a launcher so that its ranks find each other."
    ),
    "DOVETAIL_REQUIRE": Variable(
        kind="comma list", default="empty", doc="Tools whose absence is a failure and not a skip, such as `openmpi`."
    ),
    "DOVETAIL_TIMEOUT": Variable(
        kind="seconds > 0", default="300", doc="How long a rank that makes no progress is waited for."
    ),
    "DOVETAIL_TRANSPORT": Variable(
        kind="auto, unfused, decomposed, store or dma",
        default="unset",
        doc="Force a transport of fused operators where `auto` would choose; operators that lack it go their own way.",
    ),
    "DOVETAIL_VARIANT": Variable(
        kind="name of a variant", default="unset", doc="Force a variant where `auto` would choose, such as `pcpy`."
    ),
    "DOVETAIL_WORLD_SIZE": Variable(
        kind="integer >= 1", default="unset", doc="Internal: set by a launcher, the number of ranks."
    ),
}


def parse_bytes(text: str) -> int:
    """Bytes from ``'512'``, ``'64K'``, ``'16M'``, ``'2GiB'`` (powers of 1024, either case); `ValueError` otherwise."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", text.upper())
    if found is None:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with K, M, G or T, such as '16M'")
    size = float(found[1]) * _UNITS[found[2]]
    if size != int(size):
        raise ValueError(f"{text!r} is {size} bytes; a size is a whole number of bytes")
    return int(size) if "." in found[1] else int(found[1]) * _UNITS[found[2]]


def engines() -> int:
    """Runner threads per rank."""
    text = _get("DOVETAIL_ENGINES") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise _wrong("DOVETAIL_ENGINES", text)
    return int(text)


def profile_path() -> Path:
    """The file that holds the profile; the caller finds out whether it exists."""
    return Path(_get("DOVETAIL_PROFILE") or VARIABLES["DOVETAIL_PROFILE"].default).expanduser()


def check() -> bool | None:
    """Whether every plan is proved before its first run, or none; None: those that callers make."""
    return _flag("DOVETAIL_CHECK") if _get("DOVETAIL_CHECK") else None


def disable() -> bool:
    """Whether `auto` always means the baseline."""
    return _flag("DOVETAIL_DISABLE")


def variant() -> str | None:
    """The variant forced on every `auto`, or None; `dovetail.coll` knows the names."""
    return _get("DOVETAIL_VARIANT")


def transport() -> str | None:
    """The transport forced on every `auto`, or None; `dovetail.ops` knows which operator has it."""
    text = _get("DOVETAIL_TRANSPORT")
    if text is not None and text not in _TRANSPORTS:
        raise _wrong("DOVETAIL_TRANSPORT", text)
    return None if text == "auto" else text


def require() -> frozenset[str]:
    """Names of the tools that must be there."""
    return frozenset(name.strip().lower() for name in (_get("DOVETAIL_REQUIRE") or "").split(",") if name.strip())


def timeout_s() -> float:
    """Seconds until a silent rank is an error."""
    text = _get("DOVETAIL_TIMEOUT") or "300"
    try:
        seconds = float(text)
    except ValueError:
        raise _wrong("DOVETAIL_TIMEOUT", text) from None
    if not 0 < seconds < float("inf"):
        raise _wrong("DOVETAIL_TIMEOUT", text)
    return seconds


def heap_bytes() -> int:
    """Address space of one rank's part of the symmetric heap."""
    return _size("DOVETAIL_HEAP")


def gpu_segment_bytes() -> int:
    """Device memory that a GPU's heap takes at a time."""
    return _size("DOVETAIL_GPU_SEGMENT")


def _size(name: str) -> int:
    text = _get(name) or VARIABLES[name].default
    try:
        size_bytes = parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if size_bytes < 1 << 20:
        raise ValueError(f"{name}={text!r} is too small; the least is 1M")
    return size_bytes


def library(name: str) -> str:
    """The library to load for "cuda", "hip" or "hsa"."""
    return _get(f"DOVETAIL_{name.upper()}_LIBRARY") or usual_library(name)


def usual_library(name: str) -> str:
    """The library that is loaded if the environment names none."""
    return VARIABLES[f"DOVETAIL_{name.upper()}_LIBRARY"].default


def log_level() -> str:
    """The level of the logger, in the upper case that `logging` takes."""
    text = (_get("DOVETAIL_LOG") or "warning").lower()
    if text not in _LEVELS:
        raise _wrong("DOVETAIL_LOG", text)
    return text.upper()


def rank() -> int | None:
    """The rank that a launcher of ours gave this process."""
    return _count("DOVETAIL_RANK", 0)


def world_size() -> int | None:
    """The number of ranks that a launcher of ours started."""
    return _count("DOVETAIL_WORLD_SIZE", 1)


def _count(name: str, least: int) -> int | None:
    text = _get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise _wrong(name, text)
    return int(text)


def rendezvous() -> str | None:
    """The launcher's token, or None outside of a launcher."""
    return _get("DOVETAIL_RENDEZVOUS")


def unknown() -> list[str]:
    """Set variables that start with DOVETAIL_ but stand in no table: most often a misspelt name."""
    return sorted(name for name in os.environ if name.startswith("DOVETAIL_") and name not in VARIABLES)


def _get(name: str) -> str | None:
    assert name in VARIABLES
    return os.environ.get(name, "").strip() or None


def _flag(name: str) -> bool:
    text = (_get(name) or "0").lower()
    if text not in _TRUE + _FALSE:
        raise ValueError(f"{name}={text!r} is not a switch; write one of {', '.join(_TRUE + _FALSE)}")
    return text in _TRUE


def _wrong(name: str, text: str) -> ValueError:
    variable = VARIABLES[name]
    return ValueError(f"{name}={text!r} is not allowed; it takes {variable.kind} (default {variable.default})")
