"""The rewrites that SIMT targets apply to a schedule, in order, before memory is planned."""

from __future__ import annotations

from functools import partial

from ....schedule.fold_cache_scales import fold_cache_scales_if
from ....schedule.fold_position_masks import FOLD_POSITION_MASKS
from ....schedule.horizontal_fusion import common_rewrites
from ....schedule.rewrite import ScheduleRewrite
from ....target_config import TargetConfig
from ..kernels.flash import on_matrix_unit
from ..lang.dialect import Dialect
from .b2b_conv import b2b_conv
from .decode_in_products import decode_in_products
from .dual_conv import dual_conv
from .fold_row_scale import fold_row_scale
from .fuse_copies import fuse_copies
from .fuse_decode_attention import fuse_decode_attention
from .hoist_unpack import hoist_unpack
from .legalize import legalize
from .pooled_conv import pooled_conv
from .scatter_latest import scatter_latest
from .scatter_sums import scatter_sums
from .split_attention import split_attention
from .split_k import split_k
from .split_reduction import split_reduction
from .split_rms_norm import split_rms_norm
from .split_scan import split_scan
from .split_sort import split_sort
from .transpose_operands import transpose_operands
from .transpose_results import transpose_results


def rewrites(config: TargetConfig, dialect: Dialect) -> tuple[ScheduleRewrite, ...]:
    """Return the table of a SIMT target's rewrites."""
    return (
        *common_rewrites(config),
        fold_cache_scales_if(lambda k: not on_matrix_unit(k, dialect)),
        FOLD_POSITION_MASKS,
        ScheduleRewrite(
            "fuse_decode_attention",
            "rotary embeddings, cache updates and the combination of parts join a decode step's attention",
            partial(fuse_decode_attention, dialect=dialect),
        ),
        ScheduleRewrite(
            "transpose_operands",
            "right operands of 8 bits are transposed if their columns are not contiguous in memory",
            transpose_operands,
        ),
        ScheduleRewrite("fuse_copies", "copies compute their source instead of reading it", fuse_copies),
        ScheduleRewrite(
            "transpose_results",
            "results of products and convolutions that are not rows in memory are stored as rows and then transposed",
            transpose_results,
        ),
        ScheduleRewrite(
            "dual_conv",
            "a convolution whose result is only the residual of another one is computed in its kernel",
            partial(dual_conv, dialect=dialect),
        ),
        ScheduleRewrite(
            "b2b_conv",
            "a 1x1 convolution is computed in the kernel of the convolution whose results it reads",
            partial(b2b_conv, dialect=dialect),
        ),
        ScheduleRewrite(
            "pooled_conv",
            "a convolution whose result is only pooled is computed in the kernel that pools it",
            partial(pooled_conv, dialect=dialect),
        ),
        ScheduleRewrite(
            "legalize",
            "fused loops and prologues that a GPU kernel cannot run become kernels of their own",
            partial(legalize, dialect=dialect),
            required="the GPU targets have no kernels for the fused forms",
        ),
        ScheduleRewrite(
            "split_attention",
            "workgroups share the keys if there are few queries (flash decoding)",
            partial(split_attention, dialect=dialect),
        ),
        ScheduleRewrite(
            "split_k", "workgroups share long sums of few results (split-K)", partial(split_k, dialect=dialect)
        ),
        ScheduleRewrite(
            "split_reduction",
            "workgroups share the reduction of few long rows, and threads that of columns of a large matrix",
            partial(split_reduction, dialect=dialect),
        ),
        ScheduleRewrite(
            "split_scan", "workgroups scan sections of few long rows", partial(split_scan, dialect=dialect)
        ),
        ScheduleRewrite(
            "scatter_sums", "threads add scattered updates in any order, with exact arithmetic", scatter_sums
        ),
        ScheduleRewrite(
            "scatter_latest",
            "if several updates may write one element, the last one is found first, and only that one is stored",
            scatter_latest,
        ),
        ScheduleRewrite("split_sort", "long rows are sorted in sections, which are merged", split_sort),
        ScheduleRewrite(
            "fold_row_scale",
            "a factor of each row of a product is applied before its epilogue",
            partial(fold_row_scale, dialect=dialect),
        ),
        ScheduleRewrite(
            "decode_in_products",
            "products of a medium number of rows decode their weights themselves",
            partial(decode_in_products, dialect=dialect),
        ),
        ScheduleRewrite(
            "hoist_unpack",
            "weights are decoded while an earlier product runs",
            partial(hoist_unpack, dialect=dialect),
        ),
        ScheduleRewrite(
            "split_rms_norm",
            "a row norm between two products is computed in their epilogues",
            partial(split_rms_norm, dialect=dialect),
        ),
    )
