"""What `dovetail bench kv --serve` measures, as data."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.bench.serve.shapes import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One run: all models one after the other."""

    models: tuple[ServedModel, ...]
    tokens: tuple[int, ...]  #: of the prefix, for the first token
    hit_rates: tuple[float, ...]  #: shares of the requests whose prefix is kept
    cache_bytes: int  #: of the device
    contenders: tuple[str, ...]
    serve_tokens: int  #: of the prefix, for requests per second
    num_requests: int = 16
    in_flight: int = 4
    new_tokens: int = 4
    suffix_tokens: int = 64  #: of a prompt behind its prefix: never kept
    rounds: int = 5
    passes: int = 2  #: over all requests
    offload_tokens: tuple[int, ...] = ()  #: of a context in host memory
    num_prefixes: int = 4  #: different ones that are kept, for requests per second
    graphs: bool = False  #: short steps of the model are graphs
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.models or not self.contenders:
            raise ValueError("a bench of serving needs models and contenders")
        counts = {"--requests": self.num_requests, "--in-flight": self.in_flight, "--new": self.new_tokens}
        counts |= {"--iters": self.rounds, "--tokens": min((*self.tokens, self.serve_tokens))}
        for option, count in counts.items():
            if count < 1:
                raise ValueError(f"{option}: {count} must be at least 1")
        for rate in self.hit_rates:
            if not 0 <= rate <= 1:
                raise ValueError(f"--hit: {rate:g} is no share of requests: it lies between 0 and 1")

    @property
    def most_tokens(self) -> int:
        """Of the longest prefix."""
        return max(*self.tokens, self.serve_tokens)

    def cache_blocks(self, model: ServedModel) -> int:
        """Blocks of the device's cache.

        Raises:
            ValueError: requests would not fit.
        """
        blocks = self.cache_bytes // model.block_bytes
        longest = model.blocks(max(self.tokens) + self.suffix_tokens + self.new_tokens)
        serving = self.in_flight * model.blocks(self.serve_tokens + self.suffix_tokens + self.new_tokens)
        if max(longest, serving) > blocks:
            need = max(longest, serving) * model.block_bytes
            raise ValueError(f"--cache: {self.cache_bytes} bytes are too few for {model.name}: {need} are needed")
        return blocks

    def pool_blocks(self, model: ServedModel) -> int:
        """Blocks of host memory, so that nothing which is fetched later is evicted.

        Between two fetches of a prefix at most two passes store what they have missed.
        """
        missed = max((round((1 - rate) * self.num_requests) for rate in self.hit_rates), default=0)
        serving = (self.num_prefixes + 2 * missed + 1) * model.blocks(self.serve_tokens + self.suffix_tokens)
        first = sum(model.blocks(tokens + self.suffix_tokens) for tokens in self.tokens)
        return max(serving, first)

    def pinned_bytes(self, model: ServedModel) -> int:
        """Host memory that is pinned at one time, on a GPU."""
        contexts = (model.blocks(tokens) + 1 for tokens in self.offload_tokens)
        return max(self.pool_blocks(model), *contexts, 0) * model.block_bytes
