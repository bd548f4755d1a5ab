"""The places of a decoder's weights in a file: names, fused projections, and the order of rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

__all__ = ["GGUF_NAMES", "Stored", "TensorMap", "rotary_halves"]

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def rotary_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection [heads * head_dim, …]: from alternating between the two elements of
    rotary pairs (Meta's order) to all first elements of a head before all second ones (Hugging Face's order)."""
    return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


@dataclass(frozen=True)
class Stored:
    """The place of a weight in a file.

    Attributes:
        name: the file's tensor.
        rows: the range of its rows that belongs to the weight; None: all of them.
        runs: the number of equal runs that the rows are in; ``rows`` is then the range within each run.
        pairs: the number of heads if the rows need ``rotary_halves``, else 0.
        shift: added to the stored values.
        transposed: the file has [columns, rows].
    """

    name: str
    rows: tuple[int, int] | None = None
    runs: int = 1
    pairs: int = 0
    shift: float = 0.0
    transposed: bool = False

    def take(self, array: np.ndarray) -> np.ndarray:
        """Return the weight from the file's tensor, in the file's dtype (float32 if ``shift`` is not 0): a view if
        nothing has to be reordered."""
        array = array.T if self.transposed else array
        if self.rows is not None:
            begin, end = self.rows
            tail = array.shape[1:]
            in_runs = array.reshape(self.runs, -1, *tail)[:, begin:end]
            array = array[begin:end] if self.runs == 1 else in_runs.reshape(-1, *tail)
        if self.pairs:
            array = rotary_halves(array, self.pairs)
        return array.astype(np.float32) + np.float32(self.shift) if self.shift else array


@dataclass(frozen=True)
class TensorMap:
    """From the names of ``parameter_shapes`` to a file's tensors.

    A *part* is one of our names without ``model.``, the layer and the field: 'embed_tokens', 'self_attn.q_proj'.

    Attributes:
        names: part -> the file's name of it, where that differs.
        prefix: before all names but the output projection's ('lm_head').
        head_prefix: before the output projection's name.
        layer: before a layer's names; ``{}`` stands for the layer's number.
        fused: the file's name of a fused projection -> its parts, in the order of rows.
        fused_by_head: rows of a fused projection are grouped by head: the parts of head 0, the parts of head 1, …
        interleaved: rows of query and key projections alternate between the two elements of rotary pairs.
        transposed: projections of the layers are stored as [columns, rows].
        norm_shift: added to the weights of norms.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    prefix: str = "model."
    head_prefix: str = ""
    layer: str = "layers.{}."
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused_by_head: bool = False
    interleaved: bool = False
    transposed: bool = False
    norm_shift: float = 0.0

    def name(self, part: str) -> str:
        """Return the file's name of a part, without prefixes."""
        return self.names.get(part, part)

    def places(self, shapes: Mapping[str, tuple[int, ...]], num_heads: int, num_kv_heads: int) -> dict[str, Stored]:
        """Return the place of each weight of ``shapes`` (name -> shape, as ``parameter_shapes`` returns them)."""
        return {name: self._place(name, shapes, num_heads, num_kv_heads) for name in shapes}

    def _place(self, name: str, shapes: Mapping[str, tuple[int, ...]], num_heads: int, num_kv_heads: int) -> Stored:
        owner, _, leaf = name.rpartition(".")
        match = _LAYER.fullmatch(owner)
        if match is None:
            part = owner.removeprefix("model.")
            prefix = self.head_prefix if part == "lm_head" else self.prefix
            return Stored(f"{prefix}{self.name(part)}.{leaf}", shift=self._shift(part))
        layer, part = match.groups()
        stored, rows, runs = self.name(part), None, 1
        for fused, parts in self.fused.items():
            if part in parts:
                runs = num_kv_heads if self.fused_by_head else 1
                heights = {p: shapes[f"model.layers.{layer}.{p}.{leaf}"][0] // runs for p in parts}
                begin = sum(heights[p] for p in parts[: parts.index(part)])
                stored, rows = fused, (begin, begin + heights[part])
        heads = {"self_attn.q_proj": num_heads, "self_attn.k_proj": num_kv_heads}.get(part, 0)
        return Stored(
            f"{self.prefix}{self.layer.format(layer)}{stored}.{leaf}",
            rows,
            runs,
            pairs=heads if self.interleaved else 0,
            shift=self._shift(part),
            transposed=self.transposed and len(shapes[name]) == 2,
        )

    def _shift(self, part: str) -> float:
        return self.norm_shift if "norm" in part else 0.0


GGUF_NAMES: Mapping[str, str] = {
    "embed_tokens": "token_embd", "embed_positions": "position_embd", "norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
