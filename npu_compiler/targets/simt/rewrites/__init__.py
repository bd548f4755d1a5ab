"""The rewrites that SIMT targets apply to a schedule, in order, before memory is planned. Each has its own file."""

from __future__ import annotations

from ....schedule.fold_cache_scales import fold_cache_scales_if
from ....schedule.fold_position_masks import FOLD_POSITION_MASKS
from ....schedule.horizontal_fusion import common_rewrites
from ....schedule.rewrite import ScheduleRewrite
from ....target_config import TargetConfig
from ..kernels.flash import on_matrix_unit
from ..lang.dialect import Dialect
from . import (
    b2b_conv,
    decode_in_products,
    dual_conv,
    fold_row_scale,
    fuse_copies,
    fuse_decode_attention,
    hoist_unpack,
    legalize,
    pooled_conv,
    rotary_epilogue,
    scatter_latest,
    scatter_sums,
    split_attention,
    split_k,
    split_reduction,
    split_rms_norm,
    split_scan,
    split_sort,
    transpose_operands,
    transpose_results,
)
from .dialect_rewrite import DialectRewrite

REWRITES: tuple[ScheduleRewrite | DialectRewrite, ...] = (
    FOLD_POSITION_MASKS,
    fuse_decode_attention.REWRITE,
    transpose_operands.REWRITE,
    fuse_copies.REWRITE,
    transpose_results.REWRITE,
    dual_conv.REWRITE,
    b2b_conv.REWRITE,
    pooled_conv.REWRITE,
    legalize.REWRITE,
    split_attention.REWRITE,
    split_k.REWRITE,
    split_reduction.REWRITE,
    split_scan.REWRITE,
    scatter_sums.REWRITE,
    scatter_latest.REWRITE,
    split_sort.REWRITE,
    fold_row_scale.REWRITE,
    decode_in_products.REWRITE,
    hoist_unpack.REWRITE,
    split_rms_norm.REWRITE,
    rotary_epilogue.REWRITE,
)


def rewrites(config: TargetConfig, dialect: Dialect) -> tuple[ScheduleRewrite, ...]:
    """Return the table of a SIMT target's rewrites."""
    return (
        *common_rewrites(config),
        fold_cache_scales_if(lambda k: not on_matrix_unit(k, dialect)),
        *(r.bind(dialect) if isinstance(r, DialectRewrite) else r for r in REWRITES),
    )
