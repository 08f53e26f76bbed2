"""`import dovetail` is light, and what needs no hardware works without the native part and without torch."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import dovetail


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_loads_nothing_and_starts_nothing() -> None:
    code = """
import sys, threading
import dovetail
heavy = [name for name in sys.modules if name.split(".")[0] in ("torch", "numpy", "typer") or "_native" in name]
print(heavy, [name for name in sys.modules if name.startswith("dovetail.")], threading.active_count())
"""
    assert python(code) == "[] [] 1"


WITHOUT_HARDWARE = [package for package in ("plan", "profile", "sim", "report") if find_spec(f"dovetail.{package}")]


@pytest.mark.parametrize("package", WITHOUT_HARDWARE)
def test_imports_without_native_part_and_torch(package: str) -> None:
    code = f"""
import importlib, pkgutil, sys
for name in ("torch", "dovetail.hw.cpu._native"):
    sys.modules[name] = None  # importing it raises ImportError
package = importlib.import_module("dovetail.{package}")
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print("imported")
"""
    assert python(code) == "imported"


def test_doctor_runs_without_the_native_part() -> None:
    code = """
import sys
sys.modules["dovetail.hw.cpu._native"] = None
from dovetail.measure.doctor import native
print(native().value.split(":")[0])
"""
    assert python(code) == "missing"


def test_every_name_has_a_home_that_the_type_checker_sees() -> None:
    tree = ast.parse(Path(dovetail.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == dovetail._HOME | {"errors": "dovetail"}
    assert set(dovetail.__all__) == {*dovetail._HOME, "errors", "__version__"}
    assert set(dovetail.__all__) <= set(dir(dovetail))


@pytest.mark.parametrize("name", sorted(dovetail.__all__))
def test_every_name_resolves(name: str) -> None:
    assert getattr(dovetail, name) is not None


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'all_gatherer'"):
        dovetail.all_gatherer  # noqa: B018
