"""The numbers of a target that the rules and the passes ask for: data, so that a new target is a new entry here."""

from __future__ import annotations

from dataclasses import dataclass

from .support import dtypes
from .support.errors import ConfigError

_REAL = frozenset(name for name, d in dtypes.DTYPES.items() if d.kind != "complex")


@dataclass(frozen=True)
class TargetConfig:
    """Limits and preferred sizes of one target.

    ``panel``: output columns of one packed weight panel, the N width of a matmul or conv micro-kernel; 0: weights are
    not packed, a row of them is an output column, and right operands made at run time are read where they are.
    ``buffer_align``: byte alignment of every buffer, in the arena and outside.
    ``dtypes``: the element types it can hold; ``max_rank``: the most dimensions a tensor may have.
    ``matrix_dtypes``: what its matmul and convolution kernels take; ``pair_dtypes``: those of them whose weights are
    packed in pairs along the reduced dim, for two-element dot products.
    ``prologue_rows``: the most rows of a matmul whose left operand every thread may compute for itself.
    ``paired_matmuls``: whether a matmul kernel can compute two products of the same rows, for a gated activation.
    ``bundles``: whether kernels that touch different data can be one launch, if they have up to ``bundle_points``:
    a longer kernel does not mind a launch, and shows in a profile.
    ``image_row``: convolutions of up to four channels in half precision are computed on rows of so many elements
    (``image_rows.py``); 0: like any other.
    ``chunks``: tokens of a prompt that a language model's entry points take at once, besides 1; ``chunk_floor``: a run
    takes at least as long as the arithmetic of this many tokens, because it reads all weights. ``run_ahead``: whether
    runs go on while the host does something else, so that a language model had better choose likely tokens by itself.
    """

    name: str
    panel: int = 32
    buffer_align: int = 64
    max_rank: int = 8
    dtypes: frozenset[str] = _REAL
    matrix_dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    pair_dtypes: tuple[str, ...] = ("bfloat16",)
    prologue_rows: int = 0
    paired_matmuls: bool = False
    bundles: bool = False
    bundle_points: int = 1 << 16
    image_row: int = 0
    chunks: tuple[int, ...] = (32, 128)
    chunk_floor: int = 16
    run_ahead: bool = False

    @property
    def pair_width(self) -> int:
        """Neighbouring columns of each product in the weight of two paired ones: a panel, else they take turns."""
        return self.panel or 1


TARGETS: dict[str, TargetConfig] = {
    t.name: t
    for t in (
        TargetConfig("cpu", prologue_rows=4, paired_matmuls=True, bundles=True),
        TargetConfig(
            "cuda",
            panel=0,
            buffer_align=256,
            pair_dtypes=(),
            prologue_rows=1,
            paired_matmuls=True,
            bundles=True,
            bundle_points=1 << 22,
            image_row=32,
            chunks=(128, 512, 2048),
            chunk_floor=256,
            run_ahead=True,
        ),
        TargetConfig(
            "metal",
            panel=0,
            buffer_align=256,
            pair_dtypes=(),
            prologue_rows=1,
            paired_matmuls=True,
            bundles=True,
            dtypes=_REAL - {"float64"},
        ),
    )
}


def target_config(target: str | TargetConfig) -> TargetConfig:
    """The configuration of a target by name; a ``TargetConfig`` is returned as it is. ``ConfigError`` if unknown."""
    if isinstance(target, TargetConfig):
        return target
    if target not in TARGETS:
        raise ConfigError(f"unknown target {target!r}; known: {', '.join(TARGETS)}")
    return TARGETS[target]
