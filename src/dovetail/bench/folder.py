"""The folder that a runner and its ranks share: what to run and where goes in; progress, result and errors come out.

Owns the names and forms of the files in it, and nothing of what they mean. Rank 0 writes progress and result; every
rank may leave an error.
"""

from __future__ import annotations

import json
import pickle
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.bench import start
from dovetail.bench.placement import Cpu, Placement
from dovetail.bench.spec import Spec
from dovetail.errors import DovetailError


@dataclass(frozen=True)
class Folder:
    """A folder of one run; whoever made it removes it."""

    path: Path

    def prepare(self, spec: Spec, placement: Placement | None = None) -> None:
        """Put in what the ranks need."""
        (self.path / "placement").write_bytes(pickle.dumps(placement or Cpu()))
        (self.path / "spec.json").write_text(spec.to_json(), encoding="utf-8")
        start.make(self.start, spec.ranks)

    @property
    def spec(self) -> Spec:
        """What to run."""
        return Spec.from_json((self.path / "spec.json").read_text(encoding="utf-8"))

    @property
    def placement(self) -> Placement:
        """Where the tensors are; a copy for each rank to open."""
        placement: Placement = pickle.loads((self.path / "placement").read_bytes())
        return placement

    @property
    def start(self) -> Path:
        """The file behind the start line."""
        return self.path / "start"

    @property
    def store(self) -> Path:
        """The file through which the ranks' process group comes together."""
        return self.path / "store"

    @property
    def log(self) -> Path:
        """What the ranks print."""
        return self.path / "log"

    def report(self, done: int, total: int, where: str) -> None:
        """Rank 0: say how far the run is."""
        with (self.path / "progress").open("a", encoding="utf-8") as file:
            file.write(json.dumps([done, total, where]) + "\n")

    def progress(self) -> list[tuple[int, int, str]]:
        """All that was reported so far."""
        try:
            text = (self.path / "progress").read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        whole_lines = text[: text.rfind("\n") + 1].splitlines()
        return [(int(done), int(total), str(where)) for done, total, where in map(json.loads, whole_lines)]

    def write_result(self, result: dict[str, Any]) -> None:
        """Rank 0: hand over what was measured."""
        (self.path / "result.json").write_text(json.dumps(result), encoding="utf-8")

    def result(self) -> dict[str, Any]:
        """What was measured; a `DovetailError` when the ranks ended without it."""
        try:
            result: dict[str, Any] = json.loads((self.path / "result.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DovetailError("the ranks ended without a result") from None
        return result

    def write_error(self, rank: int, error: BaseException) -> None:
        """A rank: leave what went wrong. Called while `error` is handled."""
        text = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        data = {"rank": rank, "time": time.time(), "error": text, "trace": traceback.format_exc()}
        (self.path / f"error.{rank}.json").write_text(json.dumps(data), encoding="utf-8")

    def raise_error(self) -> None:
        """Raise what the first failing rank left behind, if one did; the others most often only felt its end."""
        left = [json.loads(path.read_text(encoding="utf-8")) for path in self.path.glob("error.*.json")]
        if left:
            first = min(left, key=lambda error: float(error["time"]))
            problem = DovetailError(f"rank {first['rank']} failed: {first['error']}")
            problem.add_note(str(first["trace"]))
            raise problem
