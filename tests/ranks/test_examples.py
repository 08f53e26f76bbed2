"""The examples, and the Python code in README and quickstart, run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import standin

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


def _run(path: Path) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("DOVETAIL_")}
    if not torch.cuda.is_available():
        env["DOVETAIL_CUDA_LIBRARY"] = str(standin.build("cuda"))  # for the examples that use a driver themselves
    done = subprocess.run([sys.executable, path], env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 80
    assert _run(path).strip()


@pytest.mark.parametrize(
    "name", ["README.md", "docs/quickstart.md", "docs/streaming.md", "docs/transformers.md", "docs/overlap.md"]
)
def test_code_of_the_docs(tmp_path: Path, name: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert blocks
    for number, code in enumerate(blocks):
        if '"cuda"' in code and not torch.cuda.is_available():
            continue  # torch itself needs the GPU there
        script = tmp_path / f"block{number}.py"
        script.write_text(code)
        printed = _run(script)
        if said := re.findall(r"#\s*(\[.*\])\s*$", code, re.MULTILINE):
            assert printed.strip() == said[-1]
