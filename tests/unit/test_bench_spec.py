"""What may be asked for, and what is said about the rest."""

from typing import Any

import pytest

from dovetail.bench.spec import Spec

GOOD: dict[str, Any] = {"collectives": ("all_gather",), "ranks": 2, "sizes": (1024, 4096)}


def test_travels_as_json() -> None:
    spec = Spec(**GOOD, variants=("auto", "b2b"), baselines=("openmpi", "gloo"), iterations=7, limit_s=3.5)
    assert Spec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"collectives": ("all_gathers",)}, "collective: 'all_gathers' is not known; there are all_gather, all_to_all"),
        ({"baselines": ("nccl",)}, "baseline: 'nccl' is not known; there are openmpi, gloo"),
        ({"tensors": "shared"}, "tensors: 'shared' is not known; there are symmetric, ordinary"),
        ({"dtype": "float"}, "dtype: 'float' is not known"),
        ({"ranks": 0}, "ranks is 0; it must be at least 1"),
        ({"sizes": (0,)}, "a size is 0 bytes"),
        ({"sizes": ()}, "nothing to run"),
        ({"variants": ()}, "nothing to run"),
        ({"variants": ("auto",), "baselines": ("gloo", "gloo")}, "names one twice"),
        ({"iterations": 0}, "iterations is 0"),
        ({"seconds": 0.0}, "seconds is 0.0"),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec(**{**GOOD, **change})


KNOWN = {"all_gather": ("pcpy", "b2b", "torch"), "all_reduce": ("oneshot", "torch")}


def test_variants_of_several_collectives_apply_where_they_exist() -> None:
    spec = Spec(collectives=("all_gather", "all_reduce"), ranks=2, sizes=(8,), variants=("auto", "b2b", "torch"))
    spec.check_variants(KNOWN)
    assert spec.variants_of("all_gather", ("pcpy", "b2b")) == ("auto", "b2b", "torch")
    assert spec.variants_of("all_reduce", ("oneshot",)) == ("auto", "torch")
    assert spec.lacking(KNOWN) == ["all_reduce has no variant b2b: left out; it has oneshot, torch"]


def test_unknown_variant_is_refused_with_what_there_is() -> None:
    spec = Spec(**GOOD, variants=("auto", "oneshot"))
    with pytest.raises(ValueError, match=r"variant of all_gather: 'oneshot' is not known; there are auto, pcpy, b2b"):
        spec.check_variants(KNOWN)
