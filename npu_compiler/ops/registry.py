"""The op registry: one declaration contains everything about an ATen op.

``@lowers`` declares how an op becomes primitives, ``@pointwise`` a scalar function. Parameters have the names of the
ATen schema, and their annotations say which are tensors. Support checks, the op table, the documentation and the
conformance tests all derive from these declarations. A lowering raises ``Unsupported`` for arguments that it cannot
implement exactly.
"""

from __future__ import annotations

import inspect
import logging
from collections import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..aten.op_names import STRUCTURAL, functional_name
from ..aten.tensor_lists import ENCODING, TensorLists
from ..graph.expr import Expr
from ..graph.graph import Graph, Value, result_type
from ..support import dtypes
from ..support.errors import Reason, Unsupported
from .samples import Sample

_log = logging.getLogger(__name__)
Scalar = int | float | bool
Lowering = TypeVar("Lowering", bound=Callable[..., Any])

# Arguments that never change a result here.
IGNORED_ATTRS = frozenset(
    (
        "device", "layout", "pin_memory", "memory_format", "non_blocking", "requires_grad", "copy",
        *ENCODING, "cudnn_enabled", "cudnn_enable",
    )
)  # fmt: skip


class Result(Enum):
    """What the result of an op is to its first argument (result i to tensor i, if that argument is a list), as PyTorch
    defines it."""

    NEW = auto()  # a tensor of its own
    UPDATE = auto()  # a tensor of its own: the argument with parts replaced
    VIEW = auto()  # the memory of the argument
    VIEW_IF_POSSIBLE = auto()  # that memory if strides and dtype allow it, else a copy
    SELF_IF_CONTIGUOUS = auto()  # the argument if it is row-major, else a copy

    @property
    def may_share(self) -> bool:
        """Whether it may be in the memory of the argument."""
        return self not in (Result.NEW, Result.UPDATE)

    @property
    def may_copy(self) -> bool:
        """Whether that depends on strides and dtypes."""
        return self in (Result.VIEW_IF_POSSIBLE, Result.SELF_IF_CONTIGUOUS)


@dataclass(frozen=True)
class Param:
    """One schema argument. ``kind``: 'tensor', 'optional' (tensor or None), 'list' (of tensors), 'operand' (tensor or
    scalar) or 'attr'. ``accepts``: the type of its annotation."""

    name: str
    kind: str
    default: Any
    accepts: Any  # the annotation, resolved

    @property
    def required(self) -> bool:
        """Whether a call must pass it."""
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True)
class OpDef:
    """An ATen op: overload names, its lowering, parameters in schema order, conformance samples and their dtypes.

    ``family`` is the file that declares it, ``result`` what its results are to its first argument. ``arithmetic``:
    the dtype in which it computes, '': that of its arguments. Not every target has float64.
    """

    op_types: tuple[str, ...]
    lower: Callable[..., Any]
    params: tuple[Param, ...]
    samples: tuple[Sample, ...]
    dtypes: tuple[str, ...]
    doc: str
    family: str
    result: Result
    wants_graph: bool = False
    arithmetic: str = ""


REGISTRY: dict[str, OpDef] = {}
ON_HOST: dict[str, Result] = {}  # ops without a lowering whose results are not NEW

FLOATS = ("float32", "float16", "bfloat16")
ALL = (*FLOATS, "int64")
INTS = ("int64", "int32", "bool")

_KINDS: dict[Any, str] = {
    Value: "tensor",
    Value | None: "optional",
    Value | Scalar | None: "optional",
    list[Value]: "list",
    list[Value | None]: "list",
    Value | Scalar: "operand",
    Expr: "operand",
}


def _declare(
    op_types: Sequence[str],
    f: Callable[..., Any],
    lower: Callable[..., Any],
    samples: Sequence[Sample],
    dtypes: Sequence[str],
    result: Result = Result.NEW,
    arithmetic: str = "",
) -> None:
    signature, hints = inspect.signature(f).parameters, get_type_hints(f)
    params = tuple(
        Param(p.name, _KINDS.get(hints[p.name], "attr"), p.default, hints[p.name])
        for p in signature.values()
        if p.name != "graph"
    )
    op = OpDef(
        op_types=tuple(op_types),
        lower=lower,
        params=params,
        samples=tuple(samples),
        dtypes=tuple(dtypes),
        doc=(inspect.getdoc(f) or "").split("\n")[0],
        family=f.__module__.rpartition(".")[2],
        result=result,
        wants_graph="graph" in signature,
        arithmetic=arithmetic,
    )
    for name in op_types:
        if name in REGISTRY:
            raise ValueError(f"{name} is declared twice")
        REGISTRY[name] = op


def lowers(
    *op_types: str, samples: Sequence[Sample], dtypes: Sequence[str] = FLOATS, result: Result = Result.NEW
) -> Callable[[Lowering], Lowering]:
    """Declare a lowering ``f(tensors and attrs by schema name) -> Value or tuple of Values``.

    The result's shape must be the IR's; its dtype is cast to the IR's. Half types turn float32 in arithmetic.
    ``result``: what it is to the first argument.
    A parameter named ``graph`` receives the graph under construction (for ops without tensor inputs).
    """

    def deco(f: Lowering) -> Lowering:
        _declare(op_types, f, f, samples, dtypes, result)
        return f

    return deco


def runs_on_host(*op_types: str, result: Result) -> None:
    """Declare ops without a lowering whose results are not ``NEW``."""
    ON_HOST.update(dict.fromkeys(op_types, result))


def pointwise(
    *op_types: str,
    samples: Sequence[Sample],
    dtypes: Sequence[str] = FLOATS,
    floating: bool = False,
    arithmetic: str = "",
    short: Callable[..., Expr] | None = None,
) -> Callable[[Lowering], Lowering]:
    """Declare a scalar function. Parameters annotated ``Expr`` are tensors or numbers; they arrive in one promoted
    (opmath) dtype. ``floating`` promotes integers and bools to float32 first, as ATen's float-only ops do.
    ``arithmetic``: they arrive in this dtype, 'float32', or 'float64', whose rounding errors float32 does not show;
    float64 tensors are refused. ``short``: the same function for tensors of 16 bits, if it can have fewer terms."""

    def deco(f: Lowering) -> Lowering:
        names = [name for name, hint in get_type_hints(f).items() if hint is Expr and name != "return"]

        def lower(**args: Any) -> Value:
            operands = [args[n] for n in names]
            graph = next(v.graph for v in operands if isinstance(v, Value))
            if floating and not _is_float(result_type(operands)):
                operands = [v.cast("float32") if isinstance(v, Value) else float(v) for v in operands]
            half = result_type(operands) in ("float16", "bfloat16")
            if arithmetic:
                operands = [_converted(v, arithmetic) if isinstance(v, Value) else v for v in operands]
            if half and short is not None:
                return graph.pointwise(short, *operands)
            rest = {n: v for n, v in args.items() if n not in names}
            return graph.pointwise(lambda *exprs: f(**dict(zip(names, exprs, strict=True)), **rest), *operands)

        _declare(op_types, f, lower, samples, dtypes, arithmetic=arithmetic)
        return f

    return deco


def _converted(v: Value, dtype: str) -> Value:
    if v.dtype == "float64":
        raise Unsupported(Reason("dtype", "its approximation is exact to float32, not to float64"))
    return v.cast(dtype)


def _is_float(dtype: str) -> bool:
    return dtypes.is_float(dtype)


def find(op_type: str) -> OpDef | None:
    """Return the declaration of an op, of its functional variant if it is in-place, or None."""
    return REGISTRY.get(op_type) or REGISTRY.get(functional_name(op_type))


def result_of(op_type: str) -> Result:
    """Return what the results of an op, or of its functional variant if it is in-place, are to its first argument."""
    op = find(op_type)
    return op.result if op is not None else ON_HOST.get(functional_name(op_type), Result.NEW)


def bind(op: OpDef, op_type: str, inputs: Sequence[Value], attrs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a lowering from an IR node: attrs by name, tensors in schema order. Raises
    ``Unsupported``."""
    known = {p.name for p in op.params}
    for name in attrs:
        if name not in known and name not in IGNORED_ATTRS:
            raise Unsupported(Reason("attribute", f"{op_type}: argument {name}={attrs[name]!r} is not implemented"))
    queue = list(inputs)
    lists = TensorLists(attrs)
    args: dict[str, Any] = {}

    def free(i: int) -> int:  # the inputs that the required tensors behind parameter i leave
        return len(queue) - sum(q.kind == "tensor" and q.name not in attrs for q in op.params[i + 1 :])

    for i, p in enumerate(op.params):
        if p.name in attrs:
            args[p.name] = _checked(op_type, p, attrs[p.name])
        elif p.kind == "list":
            args[p.name] = [None if none else queue.pop(0) for none in lists.take(free(i))]
        elif p.kind in ("tensor", "operand") and queue:
            args[p.name] = queue.pop(0)
        elif p.kind == "optional":  # a tensor that is None has no input; the required ones come first
            args[p.name] = queue.pop(0) if free(i) > 0 else None
        elif p.required:
            raise Unsupported(Reason("arguments", f"{op_type}: required argument {p.name} is missing"))
        else:
            args[p.name] = p.default
    if queue:
        raise Unsupported(Reason("arguments", f"{op_type}: {len(queue)} tensor input(s) more than the op takes"))
    return args


def _checked(op_type: str, p: Param, value: Any) -> Any:
    """Return the value of an attribute if it has the annotated type of the parameter; raises ``Unsupported``."""
    if not _fits(value, p.accepts):
        given = f"{value!r:.60}"
        raise Unsupported(Reason("arguments", f"{op_type}: {p.name}={given}, expected {_words(p.accepts)}"))
    return value


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, h) for h in inner)
    if origin in (list, tuple, abc.Sequence):  # tuple[()] is an empty list
        return isinstance(value, list | tuple) and (all(_fits(v, inner[0]) for v in value) if inner else not value)
    if hint is float:
        return type(value) in (int, float)
    return type(value) in (int, float, bool) if hint is Expr else type(value) is hint


def _words(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_words, inner)))
    if origin in (list, tuple, abc.Sequence):
        return f"a list of {_words(inner[0])}" if inner else "an empty list"
    return _TYPE_WORDS.get(hint, "a tensor")


_TYPE_WORDS = {int: "int", float: "float", bool: "bool", str: "text", type(None): "null", Expr: "a number or a tensor"}


def lower_call(graph: Graph, op_type: str, inputs: Sequence[Value], attrs: dict[str, Any]) -> list[Value | None]:
    """Lower one ATen call; the results have the op's own dtypes. Raises ``Unsupported`` with the reason."""
    op = find(op_type)
    if op is None:
        raise Unsupported(Reason("no_kernel", f"no lowering for {op_type}", "PyTorch runs it on the host"))
    for v in inputs:
        if dtypes.DTYPES[v.dtype].kind == "complex":
            raise Unsupported(Reason("dtype", f"{op_type}: {v.dtype} has no NPU representation", "use real tensors"))
    try:
        args = bind(op, op_type, inputs, attrs)
        out = op.lower(**args, **({"graph": graph} if op.wants_graph else {}))
    except (AssertionError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        _log.debug("lowering %s", op_type, exc_info=True)  # may also be a defect of the lowering
        raise Unsupported(Reason("arguments", f"{op_type}: {error}")) from error
    return list(out) if isinstance(out, tuple | list) else [out]


def is_op_supported(op_type: str, attrs: dict[str, Any] | None = None) -> bool:
    """Whether an ATen overload (with these attrs, if given) has an NPU lowering."""
    if op_type in STRUCTURAL:
        return True
    op = find(op_type)
    known = IGNORED_ATTRS | {p.name for p in op.params} if op else frozenset()
    return op is not None and all(name in known for name in attrs or {})


def get_supported_ops() -> frozenset[str]:
    """Return every ATen overload with an NPU lowering; in-place ops by their functional variants."""
    return frozenset(REGISTRY)
