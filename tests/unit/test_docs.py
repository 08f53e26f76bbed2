"""The documents say what is so: the variables are those of the table, the commands exist, the links lead somewhere."""

import re
from pathlib import Path

import pytest
import typer

from dovetail import cli, env

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code(text: str) -> str:
    """What stands in fenced blocks and between backquotes."""
    return "\n".join([*re.findall(r"```.*?\n(.*?)```", text, re.DOTALL), *re.findall(r"`([^`\n]+)`", text)])


def test_environment_page_is_the_table() -> None:
    rows = ["| variable | value | default | what it does |", "|---|---|---|---|"]
    rows += [f"| `{key}` | {v.kind} | `{v.default}` | {v.doc} |" for key, v in sorted(env.VARIABLES.items())]
    expected = "\n".join(rows)
    page = (ROOT / "docs/environment.md").read_text()
    assert expected in page, f"put this table into docs/environment.md:\n{expected}"
    assert set(re.findall(r"DOVETAIL_[A-Z_]+", page)) == set(env.VARIABLES)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist(page: Path) -> None:
    found = set(re.findall(r"(?:^|[\s/])dovetail ([a-z]+)", code(page.read_text()), re.MULTILINE))
    assert found <= set(cli.verbs())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_options_exist(page: Path) -> None:
    """Also of commands that need a GPU, which no test here can run."""
    app = typer.main.get_command(cli.build())
    for verb, rest in re.findall(r"(?:^|[\s/])dovetail ([a-z]+)([^\n|#]*)", code(page.read_text()), re.MULTILINE):
        command = app.commands[verb]
        words = rest.split()
        if words and words[0] in getattr(command, "commands", {}):  # a verb with verbs of its own
            command = command.commands[words[0]]
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"(?<=\s)--[a-z-]+", rest)) <= known, f"dovetail {verb}{rest}"


def test_python_in_the_quickstart_compiles() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/quickstart.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        compile(block, "quickstart.md", "exec")


def test_python_of_the_simulate_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/simulate.md").read_text(), re.DOTALL)
    exec(compile(block, "simulate.md", "exec"), {})
    assert float(capsys.readouterr().out.split()[0]) > 0


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^\s*make ([a-z]+)", code(page.read_text()), re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_variables_exist(page: Path) -> None:
    cmake = {"DOVETAIL_NATIVE"}
    assert set(re.findall(r"DOVETAIL_[A-Z_]+", page.read_text())) <= set(env.VARIABLES) | cmake
