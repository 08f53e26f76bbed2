"""Cases: sizes, data, expected results and bandwidths."""

import pytest
import torch

from dovetail.bench.cases import Case, same_bits
from dovetail.bench.spec import COLLECTIVES, DTYPES


@pytest.mark.parametrize(
    ("collective", "algbw", "busbw"),
    [
        ("all_gather", 4.0, 3.0),  # 4 ranks x 1000 bytes in 1 us; 3/4 of it comes from peers
        ("all_to_all", 1.0, 0.75),
        ("all_reduce", 1.0, 1.5),
        ("reduce_scatter", 1.0, 0.75),
        ("broadcast", 1.0, 1.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(collective: str, algbw: float, busbw: float) -> None:
    case = Case.of(collective, 4, 1_000_000)
    assert case.size_bytes == 1_000_000
    assert case.algbw_gbps(1000.0) == pytest.approx(algbw)
    assert case.busbw_gbps(1000.0) == pytest.approx(busbw)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_rank_has_finite_bandwidths(collective: str) -> None:
    case = Case.of(collective, 1, 4096)
    assert case.algbw_gbps(1.0) > 0
    assert case.busbw_gbps(1.0) >= 0


@pytest.mark.parametrize(
    ("collective", "size_bytes", "elements"),
    [("all_gather", 1030, 257), ("all_to_all", 1030, 255), ("reduce_scatter", 4, 3), ("all_reduce", 1, 1)],
)
def test_sizes_are_rounded_to_what_ranks_can_share(collective: str, size_bytes: int, elements: int) -> None:
    case = Case.of(collective, 3, size_bytes)
    assert case.num_elements == elements
    assert case.size_bytes == 4 * elements


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_differ_by_rank_and_iteration_and_repeat(collective: str, dtype: str) -> None:
    case = Case.of(collective, 3, 4096, dtype)
    inputs = [case.input(rank, iteration) for rank in range(3) for iteration in range(2)]
    assert all(given.dtype == case.torch_dtype and given.numel() == case.num_elements for given in inputs)
    assert not any(same_bits(a, b) for i, a in enumerate(inputs) for b in inputs[i + 1 :])
    assert same_bits(case.input(1, 1), inputs[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_sums_are_exact_in_every_order(dtype: str, ranks: int) -> None:
    case = Case.of("all_reduce", ranks, 4096, dtype)
    inputs = torch.stack([case.input(rank, 0) for rank in range(ranks)])
    exact = inputs.to(torch.float64).sum(0)
    assert torch.equal(case.expected(0, 0).to(torch.float64), exact)
    assert torch.equal(inputs.flip(0).to(torch.float64).sum(0), exact)


def test_expected_results() -> None:
    gather = Case.of("all_gather", 3, 24)
    assert same_bits(gather.expected(1, 5), torch.cat([gather.input(rank, 5) for rank in range(3)]))
    to_all = Case.of("all_to_all", 3, 24)
    assert same_bits(to_all.expected(2, 0), torch.cat([to_all.input(rank, 0)[4:6] for rank in range(3)]))
    scatter = Case.of("reduce_scatter", 3, 24)
    total = scatter.input(0, 0) + scatter.input(1, 0) + scatter.input(2, 0)
    assert same_bits(scatter.expected(1, 0), total[2:4])
    cast = Case.of("broadcast", 3, 24)
    assert same_bits(cast.expected(2, 0), cast.input(0, 0))


def test_same_bits_knows_nan_and_minus_zero() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_gathers", 2, 8), "'all_gathers' is not known; there are all_gather, "),
        (("all_gather", 0, 8), "at least 1"),
        (("all_gather", 2, 0), "at least 1"),
        (("all_gather", 2, 8, "complex64"), "'complex64' is not known; there are float32"),
    ],
)
def test_bad_arguments(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case.of(*arguments)  # type: ignore[arg-type]
