"""Bad usage of bench, phases and tune: status 2 and a line that says what is allowed."""

import pytest

from dovetail import cli


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench all_gathers", "collective: 'all_gathers' is not known; there are all_gather, all_to_all"),
        ("bench nonsense", "broadcast, all, kv, overlap, fused; with --backend cuda also copies, beside"),
        ("bench all_gather --ranks 0", "--ranks: 0 must be 2 to 64"),
        ("bench all_gather --ranks 1000", "--ranks: 1000 must be 2 to 64"),
        ("bench all_gather --backend cuda --ranks 65", "--ranks: 65 must be 2 to 64"),
        ("bench overlap -n 0", "--ranks: 0 must be 2 to 64"),
        ("bench fused -n 0", "--ranks: 0 must be 2 to 64"),
        ("bench fused -n 65", "--ranks: 65 must be 2 to 64"),
        ("bench fused --backend cuda -n 1000", "--ranks: 1000 must be 2 to 64"),
        ("bench fused --op=", "--op: '' names nothing"),
        ("bench fused --op , --backend cuda", "--op: ',' names nothing"),
        ("bench fused --transport=", "--transport: '' names nothing"),
        ("bench overlap --strategy=", "--strategy: '' names nothing"),
        ("bench kv --layout=", "--layout: '' names nothing"),
        ("bench all_gather --variant=", "--variant: '' names nothing"),
        ("bench all_gather --baseline=", "--baseline: '' names nothing"),
        (
            "bench fused --op gemv_all_reduce --transport store,dma",
            "--transport: none of these has 'dma' on cpu: gemv_all_reduce has unfused, decomposed, store",
        ),
        ("bench fused --transport quick", "--transport: 'quick' is not known"),
        ("doctor --selftest --ranks 5000", "--ranks: 5000 must be 2 to 64"),
        ("doctor --selftest --ranks 1", "--ranks: 1 must be 2 to 64"),
        ("doctor --selftest --timeout 0", "--timeout: 0 must be seconds above 0"),
        ("doctor --selftest --timeout nan", "--timeout: nan must be seconds above 0"),
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
        ("tune --only=", "--only: '' is not known"),
        ("tune --ranks=", "--ranks: '' names nothing"),
        ("tune --ranks 2,0", "--ranks: '0' must be a number, 2 to 64"),
        ("tune --ranks two", "--ranks: 'two' must be a number, 2 to 64"),
        ("tune --ranks 2,1000", "--ranks: '1000' must be a number, 2 to 64"),
        ("tune --only fused --ranks 65", "--ranks: '65' must be a number, 2 to 64"),
        ("tune --only overlap --ranks 1", "--ranks: '1' must be a number, 2 to 64"),
        ("tune --budget soon", "'soon' is not a time"),
    ],
)
def test_usage(
    line: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for launcher in ("dovetail.launch", "dovetail.coll.launch", "dovetail.coll.spawn.launch"):
        monkeypatch.setattr(launcher, None)  # nothing may be started
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
    if verb == "bench":
        for name in ("collectives", "--backend cuda", "kv", "kv --serve", "overlap", "fused"):
            assert f" Options of {name} " in shown
    assert shown.count(f"dovetail {verb}") >= 2
