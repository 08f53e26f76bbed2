"""Where commands write what they have measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

#: A file for the record; a folder is refused before anything is measured.
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Also write a record to FILE.")
]
