"""A driver library loaded through ctypes: typed functions that raise `DriverError` when the library refuses.

Owns the loading and the text of errors; knows no vendor. A function is made once, with its argument types, and costs
about a microsecond per call; the interpreter is free while it runs. Nothing is loaded when this module is imported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from dovetail.errors import NotSupported
from dovetail.hw.gpu.driver import DriverError

#: A bound function: takes what its argument types take and returns the library's code.
Function = Callable[..., int]

#: (library, code) -> the code's name and its message, as the library tells them.
ErrorText = Callable[["Library", int], tuple[str, str]]


class Library:
    """One loaded library. `name` is for messages ("CUDA driver"), `path` is what the loader is asked for."""

    def __init__(self, name: str, path: str, error_text: ErrorText) -> None:
        self.name, self.path = name, path
        self._error_text = error_text
        try:
            self._handle = ctypes.CDLL(path)
        except OSError as error:
            raise NotSupported(
                f"the {name} ({path}) cannot be loaded: {error}; install it, or stay on the CPU"
            ) from None

    def has(self, symbol: str) -> bool:
        """True if the library exports `symbol`."""
        return hasattr(self._handle, symbol)

    def function(self, symbol: str, *argtypes: Any) -> Function:
        """An exported function that raises `DriverError` for every code but 0. `NotSupported` if there is none."""
        return self._checked(symbol, self.raw(symbol, *argtypes))

    def raw(self, symbol: str, *argtypes: Any, restype: Any = ctypes.c_int) -> Function:
        """An exported function whose result is returned as it is, where a code other than 0 is an answer."""
        try:
            found: Any = self._handle[symbol]  # a fresh object each time, so no other user's argument types
        except AttributeError:
            raise NotSupported(f"the {self.name} ({self.path}) has no {symbol}; a newer one is needed") from None
        found.restype, found.argtypes = restype, argtypes
        return found  # type: ignore[no-any-return]

    def at(self, address: int, symbol: str, *argtypes: Any) -> Function:
        """Like `function`, for an entry point whose address the library itself gave. `symbol` is for messages."""
        return self._checked(symbol, self.raw_at(address, *argtypes))

    def raw_at(self, address: int, *argtypes: Any) -> Function:
        """Like `raw`, for an entry point whose address the library itself gave."""
        return ctypes.CFUNCTYPE(ctypes.c_int, *argtypes)(address)

    def error(self, call: str, code: int) -> DriverError:
        """The error of a call that returned `code`."""
        name, text = self._error_text(self, code)
        return DriverError(f"{call} failed: {name} ({code}): {text}", call=call, code=code)

    def _checked(self, symbol: str, function: Any) -> Function:
        def check(code: int, _function: Any, _arguments: Any) -> int:
            if code:
                raise self.error(symbol, code)
            return code

        function.errcheck = check
        return function  # type: ignore[no-any-return]
