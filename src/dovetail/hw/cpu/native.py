"""Loads the compiled module, or says what is missing."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from dovetail.errors import NotSupported

_kept: list[Any] = []


def load() -> ModuleType:
    """The module `_native`; `NotSupported` where it was not built."""
    try:
        return importlib.import_module("dovetail.hw.cpu._native")
    except ImportError as error:
        raise NotSupported(
            "the native part of dovetail is not installed: it needs Linux, and a C++ compiler when it is built. "
            "Plans, the checker, the simulator and reports work without it; `dovetail doctor` says more."
        ) from error


def keep(thing: Any) -> None:
    """Holds an object until the process ends, so that its destructor never runs."""
    _kept.append(thing)
