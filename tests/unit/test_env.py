"""Every variable: its default, a good value, a bad one with the name in the message."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail import env

ACCESSORS: dict[str, Callable[[], object]] = {
    "DOVETAIL_CHECK": env.check,
    "DOVETAIL_CUDA_LIBRARY": lambda: env.library("cuda"),
    "DOVETAIL_DISABLE": env.disable,
    "DOVETAIL_ENGINES": env.engines,
    "DOVETAIL_GPU_SEGMENT": env.gpu_segment_bytes,
    "DOVETAIL_HEAP": env.heap_bytes,
    "DOVETAIL_HIP_LIBRARY": lambda: env.library("hip"),
    "DOVETAIL_HSA_LIBRARY": lambda: env.library("hsa"),
    "DOVETAIL_LOG": env.log_level,
    "DOVETAIL_PROFILE": env.profile_path,
    "DOVETAIL_RANK": env.rank,
    "DOVETAIL_RENDEZVOUS": env.rendezvous,
    "DOVETAIL_REQUIRE": env.require,
    "DOVETAIL_TIMEOUT": env.timeout_s,
    "DOVETAIL_TRANSPORT": env.transport,
    "DOVETAIL_VARIANT": env.variant,
    "DOVETAIL_WORLD_SIZE": env.world_size,
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_every_variable_has_an_accessor() -> None:
    assert set(ACCESSORS) == set(env.VARIABLES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DOVETAIL_CHECK", None),
        ("DOVETAIL_CUDA_LIBRARY", "libcuda.so.1"),
        ("DOVETAIL_DISABLE", False),
        ("DOVETAIL_ENGINES", 1),
        ("DOVETAIL_GPU_SEGMENT", 256 << 20),
        ("DOVETAIL_HEAP", 64 << 30),
        ("DOVETAIL_HIP_LIBRARY", "libamdhip64.so"),
        ("DOVETAIL_HSA_LIBRARY", "libhsa-runtime64.so.1"),
        ("DOVETAIL_LOG", "WARNING"),
        ("DOVETAIL_PROFILE", Path("~/.cache/dovetail/profile.json").expanduser()),
        ("DOVETAIL_RANK", None),
        ("DOVETAIL_RENDEZVOUS", None),
        ("DOVETAIL_REQUIRE", frozenset()),
        ("DOVETAIL_TIMEOUT", 300.0),
        ("DOVETAIL_TRANSPORT", None),
        ("DOVETAIL_VARIANT", None),
        ("DOVETAIL_WORLD_SIZE", None),
    ],
)
@pytest.mark.parametrize("unset", ["absent", "empty", "blank"])
def test_default(name: str, value: object, unset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if unset != "absent":
        monkeypatch.setenv(name, "" if unset == "empty" else "  ")
    assert ACCESSORS[name]() == value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("DOVETAIL_CHECK", "1", True),
        ("DOVETAIL_CHECK", "off", False),
        ("DOVETAIL_DISABLE", "TRUE", True),
        ("DOVETAIL_ENGINES", "4", 4),
        ("DOVETAIL_HEAP", "2G", 2 << 30),
        ("DOVETAIL_HEAP", "1048576", 1 << 20),
        ("DOVETAIL_LOG", "Debug", "DEBUG"),
        ("DOVETAIL_PROFILE", "/some/file.json", Path("/some/file.json")),
        ("DOVETAIL_RANK", "0", 0),
        ("DOVETAIL_RENDEZVOUS", "abc", "abc"),
        ("DOVETAIL_REQUIRE", "openmpi, Browser,", frozenset({"openmpi", "browser"})),
        ("DOVETAIL_TIMEOUT", "2.5", 2.5),
        ("DOVETAIL_TRANSPORT", "store", "store"),
        ("DOVETAIL_VARIANT", "pcpy", "pcpy"),
        ("DOVETAIL_WORLD_SIZE", "8", 8),
    ],
)
def test_given(name: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    assert ACCESSORS[name]() == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DOVETAIL_CHECK", "maybe"),
        ("DOVETAIL_DISABLE", "2"),
        ("DOVETAIL_ENGINES", "0"),
        ("DOVETAIL_ENGINES", "two"),
        ("DOVETAIL_ENGINES", "-1"),
        ("DOVETAIL_HEAP", "lots"),
        ("DOVETAIL_HEAP", "4K"),
        ("DOVETAIL_LOG", "loud"),
        ("DOVETAIL_TIMEOUT", "0"),
        ("DOVETAIL_TIMEOUT", "inf"),
        ("DOVETAIL_TIMEOUT", "nan"),
        ("DOVETAIL_TIMEOUT", "soon"),
        ("DOVETAIL_TRANSPORT", "quick"),
        ("DOVETAIL_TRANSPORT", "Store"),
    ],
)
def test_wrong_value_names_the_variable_and_the_value(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=name) as caught:
        ACCESSORS[name]()
    assert text in str(caught.value)


def test_a_misspelt_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_ENGINE", "2")
    assert "DOVETAIL_ENGINE" in env.unknown()
    assert not set(env.unknown()) & set(env.VARIABLES)
