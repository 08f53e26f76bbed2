"""KV caches of known models: what a block of 16 tokens takes, by layer."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.kv.layout import Layout, block_outermost, layer_outermost

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a model keeps of a token in each layer, in 16-bit numbers where nothing else is said."""

    name: str
    num_layers: int
    row_bytes: int  #: of a block of `BLOCK_TOKENS` tokens in one layer: K and V packed, or MLA's latent
    note: str

    def layout(self, num_blocks: int, *, outermost: str = "layer") -> Layout:
        """Its cache of `num_blocks` blocks, layer-outermost or block-outermost."""
        make = {"layer": layer_outermost, "block": block_outermost}
        if outermost not in make:
            raise ValueError(f"a cache has the layer or the block outermost, not {outermost!r}")
        return make[outermost](self.name, num_layers=self.num_layers, row_bytes=self.row_bytes, num_blocks=num_blocks)

    @property
    def block_bytes(self) -> int:
        """Of a block, over all layers."""
        return self.num_layers * self.row_bytes

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // BLOCK_TOKENS)


def _attention(heads: int, width: int, element_bytes: int = 2) -> int:
    return BLOCK_TOKENS * heads * width * 2 * element_bytes  # K and V


MODELS = {
    m.name: m
    for m in (
        Model(name="llama-8b", num_layers=32, row_bytes=_attention(8, 128), note="8 KV heads of 128"),
        Model(name="llama-70b-tp4", num_layers=80, row_bytes=_attention(2, 128), note="2 of 8 KV heads of 128"),
        Model(name="llama-70b-tp8", num_layers=80, row_bytes=_attention(1, 128), note="1 of 8 KV heads of 128"),
        Model(
            name="llama-70b-tp8-fp8", num_layers=80, row_bytes=_attention(1, 128, 1), note="the same in 8-bit numbers"
        ),
        Model(name="gpt-oss", num_layers=36, row_bytes=_attention(8, 64), note="8 KV heads of 64"),
        Model(name="mla", num_layers=61, row_bytes=BLOCK_TOKENS * 576 * 2, note="latent of 512 and 64, as DeepSeek-V3"),
    )
}


def model(name: str) -> Model:
    """A model by name."""
    if name not in MODELS:
        raise ValueError(f"layout must be one of {', '.join(MODELS)}, not {name!r}")
    return MODELS[name]
