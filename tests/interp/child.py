"""Runs a test file as a program under Triton's interpreter, which is chosen by the environment, before any import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def printed(file: str) -> list[str]:
    """The words that it prints: its `__main__` runs all cases, in one process."""
    done = subprocess.run(
        [sys.executable, file],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split()
