"""Writes a JSON file at once: a reader sees the old file or the whole new one, never a part."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write_json(data: object, path: str | os.PathLike[str]) -> Path:
    """Write `data` to `path`, making the folders above it; NaN and infinity raise `ValueError` and write nothing."""
    target = Path(path).absolute()
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename stays on one file system; the number keeps writers apart.
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target
