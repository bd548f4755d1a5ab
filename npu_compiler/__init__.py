"""The compiler: from PyTorch IR to a self-contained program. Names are imported at their first use."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of _LAZY, for type checkers and the API reference
    from .artifact.program import CompiledProgram
    from .aten.ir import IRGraph
    from .aten.json_reader import load_ir, load_ir_from_dict
    from .aten.json_writer import save_ir
    from .frontend import capture
    from .frontend.kv_state import as_state
    from .mixed.compile import compile_plan
    from .mixed.program import MixedProgram, load_program
    from .ops import get_supported_ops, is_op_supported
    from .partitioning.constraint_checker import check
    from .partitioning.explain import explain
    from .partitioning.partitioner import partition
    from .partitioning.plan import PartitionPlan
    from .support.errors import CompileError, NPUError, Reason
    from .targets import CodegenTarget
    from .weights.format import Weights, register_format

__version__: str  # see _version

_LAZY = {
    "CompileError": "support.errors",
    "CompiledProgram": "artifact.program",
    "IRGraph": "aten.ir",
    "MixedProgram": "mixed.program",
    "NPUError": "support.errors",
    "PartitionPlan": "partitioning.plan",
    "Reason": "support.errors",
    "as_state": "frontend.kv_state",
    "capture": "frontend",
    "check": "partitioning.constraint_checker",
    "compile_plan": "mixed.compile",
    "explain": "partitioning.explain",
    "get_supported_ops": "ops",
    "is_op_supported": "ops",
    "load_ir": "aten.json_reader",
    "load_ir_from_dict": "aten.json_reader",
    "load_program": "mixed.program",
    "partition": "partitioning.partitioner",
    "register_format": "weights.format",
    "save_ir": "aten.json_writer",
}

__all__ = [
    "CompileError",
    "CompiledProgram",
    "IRGraph",
    "MixedProgram",
    "NPUError",
    "PartitionPlan",
    "Reason",
    "as_state",
    "capture",
    "check",
    "compile",
    "compile_plan",
    "explain",
    "get_supported_ops",
    "is_op_supported",
    "load_ir",
    "load_ir_from_dict",
    "load_program",
    "partition",
    "register_format",
    "save_ir",
]


def compile(
    ir: Any,
    target: str | CodegenTarget = "cpu",
    dtype: Any = None,
    disable: Collection[str] = (),
    weights: Weights = None,
    float32_precision: str = "highest",
    speed_over_memory: bool = False,
    activations: str | None = None,
) -> CompiledProgram:
    """Compile IR (a path, a dict, an :class:`IRGraph` or a pytorch-ir object) into a :class:`CompiledProgram`.

    ``target``: a name, or a code generator, which is known by its name from then on (``register_target``). ``dtype``
    stores float32 activations and matrices as 'float16' or 'bfloat16' (None: as the IR says); a ``torch.dtype`` or a
    numpy dtype will do. ``disable`` names passes to leave out. ``weights`` names the format in which the matrices of
    products are stored: 'bf16c12' (lossless), block formats ('q8_0', 'int4_g128', 'fp8_e4m3', …), or one that was
    given to ``register_format`` (None: their elements); a mapping gives formats by the names of weights, and by '*'
    that of all others. ``float32_precision``: on the target 'cuda', 'tf32' lets products and convolutions round
    float32 operands to 10 bits of fraction; 'highest' does not. PyTorch's own switches have no effect.
    ``speed_over_memory``: on GPUs, where products of several rows decode weights in a format in every run, store their
    elements as well. ``activations``: 'fp8' quantises rows of activations to float8_e4m3fn in front of matrices in an
    fp8 format, except in products of one row. Raises :class:`ConfigError` for any other dtype, target, format,
    precision or type of activations, :class:`IRError` for malformed IR, :class:`CompileError` with every reason if some
    node cannot run on the target, :class:`ToolchainError` without a usable compiler.
    """
    from .aten.json_reader import load_ir
    from .pipeline import compile_ir
    from .targets import target_name

    return compile_ir(
        load_ir(ir),
        target_name(target),
        dtype,
        disable=disable,
        weights=weights,
        float32_precision=float32_precision,
        speed_over_memory=speed_over_memory,
        activations=activations,
    )


def _version() -> str:
    """The version of the installed distribution: the git tag that it was built from."""
    from importlib import metadata

    try:
        return metadata.version("npusim")
    except metadata.PackageNotFoundError:  # a source folder that is only on the path
        return "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _LAZY:
        value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; see docs/names.md")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
