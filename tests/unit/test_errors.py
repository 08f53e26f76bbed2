"""The errors carry their facts, also through pickle."""

import pickle

import pytest

from dovetail import errors

MADE = {
    "NotSupported": errors.NotSupported("no swap on this engine"),
    "HardwareError": errors.HardwareError("mmap failed"),
    "PeerError": errors.PeerError("rank 3 died", rank=3),
    "PlanError": errors.PlanError("race", steps=["copy a", "copy b"]),
    "Timeout": errors.Timeout("rank 1 is late"),
    "MismatchError": errors.MismatchError("ranks disagree", calls={1: "barrier()", 0: "all_reduce(1024)"}),
}


@pytest.mark.parametrize("name", MADE)
def test_every_error_is_a_dovetail_error(name: str) -> None:
    assert isinstance(MADE[name], errors.DovetailError)
    assert type(MADE[name]).__doc__


@pytest.mark.parametrize("name", MADE)
def test_pickle_keeps_message_and_facts(name: str) -> None:
    error = MADE[name]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_timeout_is_the_builtin_one_too() -> None:
    with pytest.raises(TimeoutError):
        raise errors.Timeout("late")


def test_facts() -> None:
    assert errors.PeerError("gone", rank=2).rank == 2
    assert errors.PlanError("race", steps=iter("ab")).steps == ("a", "b")
    assert errors.PlanError("race").steps == ()


def test_mismatch_shows_both_calls_in_rank_order() -> None:
    assert str(MADE["MismatchError"]).splitlines() == [
        "ranks disagree",
        "  rank 0 called all_reduce(1024)",
        "  rank 1 called barrier()",
    ]
