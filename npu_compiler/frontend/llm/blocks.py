"""The structure of a decoder layer: the places of its norms, and whether its two branches are parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["BLOCKS", "Block"]


@dataclass(frozen=True)
class Block:
    """The names of a layer's norms by their places; None: there is no norm.

    Without ``parallel``, the layer computes ``x += after_attention(attention(before_attention(x)))`` and then
    ``x += after_mlp(mlp(before_mlp(x)))``. With it, both branches read the layer's input; if ``before_mlp`` is None,
    the MLP reads the result of ``before_attention``.
    """

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None
    parallel: bool = False

    def norms(self) -> Iterator[str]:
        """Yield the names of all norms, in the order of computation."""
        places = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return (name for name in places if name is not None)


# Names are those of transformers, which calls the norm before the MLP 'post_attention_layernorm'.
BLOCKS = {
    "pre_norm": Block("input_layernorm", None, "post_attention_layernorm"),
    "post_norm": Block(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "sandwich_norm": Block(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    "parallel": Block("input_layernorm", parallel=True),
    "parallel_two_norms": Block("input_layernorm", None, "post_attention_layernorm", parallel=True),
}
