"""What a target accepts, node by node, and why not: the one answer that compile(), partition() and explain() share.

Shapes are static by construction of the IR. Rank and dtypes are limits of the :class:`TargetConfig`; whether an op with
these attributes exists is decided by a dry run of its lowering, the very code that compiles it. Channel alignment never
refuses a node - packing pads - so it is advice.
"""

from __future__ import annotations

from .alias import base_name
from .dtypes import DTYPES
from .errors import Reason
from .ir import IRGraph, OpNode
from .lower import check_node
from .ops.registry import STRUCTURAL
from .target_config import TargetConfig, target_config

# Channel dimension of the first input of ops whose channels the target pads.
_CHANNELS = {"conv1d": 1, "conv2d": 1, "conv3d": 1, "convolution": 1, "linear": -1}


def reason_against(node: OpNode, target: str | TargetConfig = "cpu") -> Reason | None:
    """Why ``node`` cannot run on ``target``, or None if it can."""
    if node.op_type.startswith("wrap_with"):
        detail = f"the extractor lost the body of this {node.op_type.removeprefix('wrap_with_')} region"
        return Reason("lost_region", detail, "capture the model with npu_compiler.capture")
    config = target_config(target)
    for t in (*node.inputs, *node.outputs):
        if len(t.shape) > config.max_rank:
            detail = f"{t.name} has rank {len(t.shape)}, {config.name} takes at most {config.max_rank}"
            return Reason("rank", detail, "flatten dimensions that stay together")
        if t.dtype not in config.dtypes:
            held = ", ".join(name for name in DTYPES if name in config.dtypes)
            fix = "use real tensors" if DTYPES[t.dtype].kind == "complex" else f"cast it to one of {held}"
            return Reason("dtype", f"{t.name} is {t.dtype}, which {config.name} does not hold", fix)
    return None if node.op_type in STRUCTURAL else check_node(node)


def check(ir: IRGraph, target: str | TargetConfig = "cpu") -> list[tuple[str, str, Reason]]:
    """(node name, op type, reason) of every node that ``target`` refuses; empty if the whole graph compiles."""
    config = target_config(target)
    found = ((node, reason_against(node, config)) for node in ir.nodes)
    return [(node.name, node.op_type, reason) for node, reason in found if reason is not None]


def advice(node: OpNode, target: str | TargetConfig = "cpu") -> str:
    """A hint how ``node`` would run better, or ''."""
    where = _CHANNELS.get(base_name(node.op_type))
    if where is None or not node.inputs or len(node.inputs[0].shape) < 2:
        return ""
    config, t = target_config(target), node.inputs[0]
    channels = t.shape[where]
    padded = config.padded_channels(channels, t.dtype)
    if padded == channels:
        return ""
    return f"{channels} channels are padded to {padded} ({config.channel_align_bytes}-byte alignment)"
