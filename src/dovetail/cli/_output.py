"""Where commands write what they have found. A path that can't be written is refused before anything is measured."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.errors import DovetailError

if TYPE_CHECKING:
    from dovetail.measure.record import Record


#: Files with what a command had done when it was ended.
KEPT: list[str] = []


def kept_apart(path: Path) -> Path:
    """Where a command that is ended writes what it has done: a part never replaces a whole. `main` names it.

    >>> kept_apart(Path("some.json")).name
    'some.partial.json'
    """
    found = path.with_suffix(f".partial{path.suffix}")
    KEPT.append(str(found))
    return found


def check_file(what: str, path: Path, *, suffix: str = "", makes_folders: bool = False) -> None:
    """Raises `ValueError` unless a file can be written at `path`. Leaves nothing behind.

    Args:
        what: its option.
        makes_folders: folders above it may be missing; else that is refused, since most often it is a slip.
    """
    if path == Path("-"):
        raise ValueError(f"{what}: '-' is no file, and standard output has what is printed; name a file")
    if suffix and path.suffix != suffix:
        raise ValueError(f"{what}: {path} must end in {suffix}")
    try:
        if path.is_dir():
            raise ValueError(f"{what}: {path} is a directory; name a file")
        if path.exists() and not path.is_file():
            raise ValueError(f"{what}: {path} is no ordinary file")
        if path.exists() and not os.access(path, os.W_OK):
            raise ValueError(f"{what}: {path} is there and may not be written")
        if not makes_folders:
            _is_there(what, path)
        _try_in(path.parent)
    except OSError as error:
        raise _unwritable(what, path, error) from None


def check_folder(what: str, path: Path) -> None:
    """Raises `ValueError` unless files can be written into a folder `path`, which may be missing."""
    try:
        if path.exists() and not path.is_dir():
            raise ValueError(f"{what}: {path} is no folder")
        _try_in(path)
    except OSError as error:
        raise _unwritable(what, path, error) from None


def _is_there(what: str, path: Path) -> None:
    """Raises `ValueError` if the folder of a file, or one above it, is missing."""
    if _nearest(path.parent).is_dir() and not path.parent.exists():
        raise ValueError(f"{what}: {path} can't be written: there is no folder {path.parent}; make it, or name another")


def _nearest(folder: Path) -> Path:
    """The folder, or the first one above it that is there."""
    whole = folder.absolute()
    return next(place for place in (whole, *whole.parents) if place.exists())


def _try_in(folder: Path) -> None:
    """Makes a file without a name in the folder, or in the first one above it that is there."""
    with tempfile.TemporaryFile(dir=_nearest(folder)):
        pass


def _unwritable(what: str, path: Path, error: OSError) -> ValueError:
    return ValueError(f"{what}: {path} can't be written: {error.strerror}")


def profile_can_be_saved() -> None:
    """Raises `ValueError` if the profile, in which a command would save what it finds, can't be written."""
    from dovetail import env

    check_file("DOVETAIL_PROFILE", env.profile_path(), makes_folders=True)


def refuse_nothing(rows: Sequence[object]) -> None:
    """Raises `DovetailError` where nothing was measured: what was not checked is not right."""
    if not rows:
        raise DovetailError("nothing was measured; the notes say why")


def ended_early(done: Collection[int], wanted: Iterable[int]) -> None:
    """Says which numbers of ranks a command is done with that is ended before it has measured all that are wanted."""
    kept, left = (", ".join(map(str, numbers)) for numbers in (done, [n for n in wanted if n not in done]))
    print(f"ended early: what was measured with {kept} ranks is kept; with {left} it is not done", file=sys.stderr)


def save(record: Record, path: Path) -> None:
    """Writes a record; an error names the path that was given."""
    from dovetail.measure import record as records

    try:
        records.write(record, path)
    except OSError as error:
        raise OSError(f"--json: {path} can't be written: {error.strerror}") from error


def _callback(
    check: Callable[[str, Path], None],
) -> Callable[[typer.CallbackParam, Path | None], Path | None]:
    """For an option that names a path: `check` is called when the command line is read."""

    def checked(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
        if path is not None:
            check(max(parameter.opts, key=len), path)
        return path

    return checked


def _plot(option: str, path: Path) -> None:
    check_file(option, path, suffix=".html")
    _needs_plotly(option)


def _plots(option: str, path: Path) -> None:
    check_folder(option, path)
    _needs_plotly(option)


def _needs_plotly(option: str) -> None:
    import importlib.util

    if importlib.util.find_spec("plotly") is None:
        raise ValueError(f"{option} needs plotly: pip install 'dovetail-ml[report]'")


FILE, FOLDER, PLOT, PLOTS = _callback(check_file), _callback(check_folder), _callback(_plot), _callback(_plots)
"""Callbacks of options: a file, a folder, a page with a plot, a folder of such pages."""

Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", callback=FILE, help="Also write a record to FILE.")
]
"""A file for the record."""
