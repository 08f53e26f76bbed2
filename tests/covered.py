"""Fails if a file of the GPU executor is tested too little without a GPU: `python -m tests.covered` after `coverage`.

Left out are kernels and their launchers, which need a GPU: `tests/gpu` has those.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LEAST_PERCENT = 95.0
NEED_A_GPU = ("kernels/", "cores.py", "hold.py", "reduce.py")


def main() -> int:
    """Prints a line per file; 1 if one of them, or the whole, is below the least share."""
    report = Path(".coverage.json")
    subprocess.run([sys.executable, "-m", "coverage", "json", "-q", "-o", str(report)], check=True)
    files = json.loads(report.read_text())["files"]
    report.unlink()
    folder = "src/dovetail/hw/gpu/"
    shares = {
        name.removeprefix(folder): found["summary"]["percent_covered"]
        for name, found in files.items()
        if not name.removeprefix(folder).startswith(NEED_A_GPU)
    }
    for name, share in sorted(shares.items(), key=lambda item: item[1]):
        print(f"{share:5.1f} % {name}" + ("  TOO LITTLE" if share < LEAST_PERCENT else ""))
    return int(not shares or min(shares.values()) < LEAST_PERCENT)


if __name__ == "__main__":
    raise SystemExit(main())
