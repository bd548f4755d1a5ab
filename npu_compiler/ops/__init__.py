"""The op registry. Importing it declares every op; one file per family."""

from . import (  # noqa: F401
    activations,
    arithmetic,
    attention,
    casts,
    comparison,
    convolution,
    creation,
    indexing,
    joining,
    linear_algebra,
    norms,
    padding,
    pooling,
    quantization,
    reductions,
    resize,
    sampling,
    scattering,
    slicing,
    sorting,
    views,
)
from .registry import REGISTRY, OpDef, find, get_supported_ops, is_op_supported, lower_call

__all__ = ["REGISTRY", "OpDef", "find", "get_supported_ops", "is_op_supported", "lower_call"]
