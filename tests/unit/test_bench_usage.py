"""Bad usage of bench, phases and tune: status 2 and a line that says what is allowed."""

import pytest

from dovetail import cli


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench all_gathers", "collective: 'all_gathers' is not known; there are all_gather, all_to_all"),
        ("bench all_gather --ranks 0", "ranks is 0; it must be at least 1"),
        ("bench all_gather -b 1Q", "'1Q' is not a size"),
        ("bench all_gather -b 0", "must be above 0"),
        ("bench all_gather -b 2M -e 1M", "not above the last"),
        ("bench all_gather -f 1", "factor is 1"),
        ("bench all_gather --variant pcpy,oneshot", "'oneshot' is not known; there are auto, pcpy"),
        ("bench all_gather --variant pcpy,pcpy", "names one twice"),
        ("bench all_gather --baseline nccl", "baseline: 'nccl' is not known; there are openmpi, gloo"),
        ("bench all_gather --tensors shared", "there are symmetric, ordinary"),
        ("bench all_gather --dtype float8", "dtype: 'float8' is not known"),
        ("bench all_gather --iters 0", "iterations is 0"),
        ("phases -b x", "'x' is not a size"),
        ("tune --only power", "--only: 'power' is not known; there are coll, kv"),
        ("tune --ranks 2,0", "--ranks: '2,0' must be numbers of at least 1"),
        ("tune --ranks two", "--ranks: 'two' must be numbers"),
        ("tune --budget soon", "'soon' is not a time"),
    ],
)
def test_usage(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code == cli.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["bench", "phases", "tune"])
def test_help_has_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([verb, "--help"])
    assert ended.value.code == cli.OK
    shown = capsys.readouterr().out
    assert "Examples:" in shown
    assert shown.count(f"dovetail {verb}") >= 2
