"""Calls are issued in the order in which they were made, inline or behind what is pending."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent import futures

import pytest

from dovetail.errors import DovetailError
from dovetail.hw.gpu.issuer import Issuer


def test_order() -> None:
    issuer, done, gate = Issuer(), [], threading.Event()
    assert issuer.run(threading.get_ident) == threading.get_ident()  # nothing is pending: no thread is needed
    first = issuer.later(lambda: gate.wait(10))
    second = issuer.later(lambda: done.append("second"))
    threading.Timer(0.05, gate.set).start()
    assert issuer.run(threading.get_ident) != threading.get_ident()
    assert first.result(10)
    assert done == ["second"]
    assert second.done()
    assert issuer.run(threading.get_ident) == threading.get_ident()
    issuer.close()


def test_errors_and_the_end() -> None:
    issuer, gate = Issuer(), threading.Event()
    held = issuer.later(lambda: gate.wait(10))
    threading.Timer(0.05, gate.set).start()
    with pytest.raises(ZeroDivisionError):
        issuer.run(lambda: 1 // 0)  # in the thread, and raised here
    assert held.result(10)
    gate.clear()
    issuer.later(lambda: gate.wait(10))
    never = issuer.later(lambda: None)
    issuer.close()
    gate.set()
    assert never.cancelled()
    assert futures.wait([never], timeout=1).done  # who waits for it goes on
    with pytest.raises(DovetailError, match="is closed"):
        issuer.later(lambda: None)


def test_a_pending_call_does_not_hold_up_the_exit() -> None:
    code = "import threading; from dovetail.hw.gpu.issuer import Issuer; Issuer().later(threading.Event().wait)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
