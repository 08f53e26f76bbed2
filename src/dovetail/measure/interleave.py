"""Times several contenders side by side: in every round each is called once, in an order that favours none.

Owns the order of the calls and the clock around them. It knows neither collectives nor ranks: every rank runs the same
schedule, and `start`, which the caller gives, makes the ranks begin each call together.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence


def orders(num_contenders: int) -> list[tuple[int, ...]]:
    """Orders in which each contender stands at each place, and directly behind each other one, equally often.

    A plain rotation would let a contender always run behind the same neighbour, with the caches as that one left them.
    This is Williams' design: n orders for an even number of contenders, 2n for an odd one.

    >>> orders(2)
    [(0, 1), (1, 0)]
    """
    if num_contenders < 1:
        raise ValueError(f"there must be at least one contender, got {num_contenders}")
    low, high = 0, num_contenders - 1
    zigzag: list[int] = []
    while low <= high:
        zigzag += [low] if low == high else [low, high]
        low, high = low + 1, high - 1
    square = [tuple((place + shift) % num_contenders for place in zigzag) for shift in range(num_contenders)]
    if num_contenders % 2 and num_contenders > 1:
        square += [order[::-1] for order in square]
    return square


def some_orders(num_contenders: int, rounds: int, seed: int | str = 0) -> list[tuple[int, ...]]:
    """As many of `orders` as there are rounds, spread over all of them, in a shuffled order that `seed` settles.

    The first few of the design would have some contenders early in each. Where there are more rounds than orders, all
    are taken, again and again.

    >>> sorted(some_orders(2, 4))
    [(0, 1), (0, 1), (1, 0), (1, 0)]
    """
    square, chance = orders(num_contenders), random.Random(seed)
    found: list[tuple[int, ...]] = []
    while len(found) < rounds:
        number = min(len(square), rounds - len(found))
        cuts = [len(square) * n // number for n in range(number + 1)]
        some = [square[chance.randrange(cuts[n], cuts[n + 1])] for n in range(number)]
        chance.shuffle(some)
        found += some
    return found


def schedule(iterations: Sequence[int]) -> list[int]:
    """Who is called when: contender c exactly ``iterations[c]`` times, the rarer ones spread evenly over the rounds.

    >>> schedule([2, 2])
    [0, 1, 1, 0]
    """
    if not iterations or min(iterations) < 0:
        raise ValueError(f"iterations must be given for each contender and not be negative, got {list(iterations)}")
    rounds = max(iterations)
    square = orders(len(iterations))
    calls: list[int] = []
    for turn in range(rounds):
        for contender in square[turn % len(square)]:
            wanted = iterations[contender]
            if turn * wanted // rounds != (turn + 1) * wanted // rounds:
                calls.append(contender)
    return calls


def interleave(
    calls: Sequence[Callable[[], object]], start: Callable[[], object], iterations: Sequence[int]
) -> list[list[int]]:
    """Call every contender its number of times and return its times in nanoseconds.

    Args:
        calls: one per contender; called with nothing, the result is dropped.
        start: called before each call and not timed; it returns on all ranks at the same moment.
        iterations: how often each contender is called; the same on all ranks.
    """
    if len(calls) != len(iterations):
        raise ValueError(f"{len(calls)} contenders but {len(iterations)} numbers of iterations")
    turns = schedule(iterations)
    times: list[list[int]] = [[] for _ in calls]
    clock = time.perf_counter_ns
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for contender in turns:
            call = calls[contender]
            start()
            begin = clock()
            call()
            end = clock()
            times[contender].append(end - begin)
    finally:
        if collecting:
            gc.enable()
    return times
