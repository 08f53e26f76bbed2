"""Machine files: what is shipped, round trips, and errors that say what to do."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.unit import simlib

from dovetail.sim import MachineError, files
from dovetail.sim.machine import NUMBERS, Origin, Source
from dovetail.sim.net import fit_launch


def test_the_shipped_machines() -> None:
    assert files.names() == ["cpu-2core", "h200-nvl8", "mi210", "mi300x"]


@pytest.mark.parametrize("name", files.names())
def test_a_shipped_machine_says_where_every_constant_comes_from(name: str) -> None:
    machine = files.load(name)
    assert machine.name == name
    written = tomllib.loads((Path(files.__file__).parent / "machines" / f"{name}.toml").read_text())
    for section in ("host", "engine", "link", "memory", "compute"):
        for key in written[section]:
            source = machine.sources[f"{section}.{key}"]
            assert len(source.note) > 5
            if source.origin in (Origin.MEASURED, Origin.FITTED):
                assert re.search(r"benchmarks/|table|H200", source.note), source


@pytest.mark.parametrize("name", files.names())
def test_a_shipped_machine_survives_writing(name: str, tmp_path: Path) -> None:
    machine = files.load(name)
    assert files.load(files.write(machine, tmp_path / "m.toml")) == machine


@settings(max_examples=40)
@given(
    values=some.fixed_dictionaries(
        {
            name: some.integers(2, 9) if whole else some.floats(1e-3, 1e6).map(lambda v: float(f"{v:.6g}"))
            for name, (_, whole) in NUMBERS.items()
        }
    ),
    note=some.text(some.characters(exclude_categories=("Cs", "Cc")), min_size=1).filter(str.strip),
    origin=some.sampled_from(Origin),
)
def test_any_machine_survives_writing(values: dict[str, float], note: str, origin: Origin) -> None:
    machine = simlib.machine().replace(values, Source(origin=origin, note=note))
    again = files.parse(tomllib.loads(files.dump(machine)))
    assert again.constants() == machine.constants()
    assert all(again.sources[name] == machine.sources[name] for name in values)




def changed(*path: str, to: Any) -> dict[str, Any]:
    data: dict[str, Any] = tomllib.loads(files.dump(files.load("mi300x")))
    at = data
    for key in path[:-1]:
        at = at[key]
    if to is None:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: changed("name", to=None), "name must be a text, found None"),
        (lambda: changed("ranks", to="8"), "ranks must be a whole number, found '8'"),
        (lambda: changed("ranks", to=True), "ranks must be a whole number, found True"),
        (lambda: changed("ranks", to=0), "ranks must be at least 1, not 0"),
        (lambda: changed("links", to={}), "the top level has no key 'links'; allowed are name, title"),
        (lambda: changed("engine", to=None), r"the table \[engine\] is missing"),
        (lambda: changed("engine", "poll_ns", to=None), r"\[engine\] has no poll_ns; it needs count, steps"),
        (lambda: changed("engine", "pol_ns", to=1), r"\[engine\] has no key 'pol_ns'; allowed are count, steps"),
        (lambda: changed("host", "submit_ns", to=320), r"host.submit_ns must be \{ value = .., origin = "),
        (lambda: changed("host", "submit_ns", "note", to=None), "has no note: every constant says where it comes from"),
        (lambda: changed("host", "submit_ns", "note", to=" "), "the note must say which table, paper or reasoning"),
        (lambda: changed("host", "submit_ns", "origin", to="guessed"), "origin must be one of published, measured"),
        (lambda: changed("host", "submit_ns", "value", to="x"), "host.submit_ns must be a number, found 'x'"),
        (lambda: changed("host", "submit_ns", "value", to=-1), "host.submit_ns must be from 0 to 1e.15, not -1"),
        (lambda: changed("link", "bandwidth_gbps", "value", to=0), "bandwidth_gbps must be from 1e-06 to 1e.15, not 0"),
        (lambda: changed("link", "bandwidth_gbps", "value", to=float("inf")), "must be from 1e-06 to 1e.15, not inf"),
        (lambda: changed("engine", "count", "value", to=1.5), "engine.count must be a whole number, found 1.5"),
        (lambda: changed("engine", "count", "value", to=0), "engine.count must be from 1 to 1e.15, not 0"),
        (lambda: changed("link", "wiring", "value", to="mesh"), "link.wiring must be one of fully_connected, switch"),
        (lambda: changed("host", "threads", "value", to=["one"]), "host.threads must be one of one, rank"),
        (lambda: changed("engine", "steps", "value", to=["copy", "fly"]), "engine.steps must be a list out of copy"),
        (lambda: changed("engine", "steps", "value", to=["swap"]), "engine.steps must have copy"),
    ],
)  # fmt: skip
def test_a_bad_file_names_the_place_and_what_is_allowed(data: Callable[[], dict[str, Any]], message: str) -> None:
    with pytest.raises(MachineError, match=message):
        files.parse(data())


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="no machine 'mi300'; shipped are cpu-2core, h200-nvl8, mi210, mi300x"):
        files.load("mi300")
    with pytest.raises(MachineError, match=r"machine file .*none.toml: it cannot be read"):
        files.load(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("name = \n")
    with pytest.raises(MachineError, match=r"machine file .*bad.toml: not TOML"):
        files.load(bad)
    bad.write_text("name = 3\n")
    with pytest.raises(MachineError, match=r"machine file .*bad.toml: name must be a text, found 3"):
        files.load(str(bad))


def test_a_machine_without_sources_can_be_written_and_odd_names_too(tmp_path: Path) -> None:
    bare = simlib.machine(name="a \x7f \u2713 \" \\ name")
    again = files.read(files.write(bare, tmp_path / "bare.toml"))
    assert again.constants() == bare.constants()
    assert again.name == bare.name
    assert {s.note for s in again.sources.values()} == {"not said"}


def test_a_machine_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    blank = simlib.machine().replace({"host.submit_ns": 1}, Source(origin=Origin.FITTED, note=" "))
    with pytest.raises(MachineError, match="the note must say"):
        files.write(blank, tmp_path / "m.toml")
    assert not (tmp_path / "m.toml").exists()


def test_a_number_that_is_far_too_large(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    text = files.dump(simlib.machine())
    bad.write_text(text.replace("submit_ns = { value = 100", f"submit_ns = {{ value = {10**400}"))
    with pytest.raises(MachineError, match="bad.toml: host.submit_ns has a number that is far too large"):
        files.read(bad)


def test_links_of_a_machine_as_a_network() -> None:
    network = files.load("mi300x").network(4)
    (links,) = network.dimensions
    assert (network.ranks, links.kind, links.bandwidth_gbps) == (4, "fully_connected", 46.55)
    with pytest.raises(MachineError, match="this network is for 9 ranks, machine mi300x has 8"):
        files.load("mi300x").network(9)


def test_the_launch_time_of_a_library_is_the_fit_of_its_table() -> None:
    rows = json.loads((simlib.DATA / "mi300x_rccl_all_reduce.json").read_text())["rows"]
    large = [(row["size_bytes"], row["time_us"] * 1000) for row in rows if row["size_bytes"] >= 16 << 20]
    machine = files.load("mi300x")
    found = fit_launch(machine.network(), "all_reduce", "direct", large)
    assert found.launch_ns == pytest.approx(machine.library.launch_ns, abs=1)
    assert found.worst < 0.05


def test_constants_by_name() -> None:
    machine = simlib.machine()
    assert machine.value("engine.poll_ns") == 500
    assert machine.replace({"engine.poll_ns": 1}).engine.poll_ns == 1
    with pytest.raises(MachineError, match="has no constant 'engine.pol_ns'; it has host.submit_ns"):
        machine.replace({"engine.pol_ns": 1})
