"""Scalar expressions, of which pointwise ops, reductions and kernel epilogues consist.

An :class:`Expr` is a node of an interned DAG: two structurally equal expressions are the same object, so common
subexpressions cost nothing and expressions are hashable. Targets render them as code;
:func:`.expr_interp.evaluate` computes them in numpy.

Leaves:
  ``const``      value                         a literal
  ``index``      value = dim                   the position along one dim of the iteration domain (int64)
  ``load``       value = operand, args = idx   one element of an operand, one int64 index expression per operand dim
  ``stage``      value = stage number          the result of an earlier reduction or temporary of the same kernel
  ``acc``                                      the accumulator that a matmul or convolution passes to its epilogue
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..support import dtypes
from .scalar_ops import EXPENSIVE, SCALAR_OPS, takes

_interned: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()
_interning = threading.RLock()  # threads may compile at once


class Expr:
    """An immutable scalar expression of a known dtype; supports Python operators (scalars become constants)."""

    __slots__ = ("__weakref__", "_affine", "_order", "args", "dtype", "op", "value")
    op: str
    dtype: str
    args: tuple[Expr, ...]
    value: Any
    _order: tuple[Expr, ...] | None  # the result of walk(), without the root
    _affine: Any  # the result of affine.affine(), or None

    def __new__(cls, op: str, dtype: str, args: Sequence[Expr] = (), value: Any = None) -> Expr:
        args = tuple(args)
        if op == "const":  # repr keeps -0.0, nan and 1 vs True vs 1.0 apart
            key: tuple[Any, ...] = (op, dtype, repr(value))
        else:
            key = (op, dtype, tuple(map(id, args)), value)
        found = _interned.get(key)
        if found is None:
            with _interning:
                found = _interned.get(key)
                if found is None:
                    found = object.__new__(cls)
                    found.op, found.dtype, found.args, found.value = op, dtype, args, value
                    found._order = found._affine = None
                    _interned[key] = found
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Expr, (self.op, self.dtype, self.args, self.value)

    def __deepcopy__(self, memo: Any) -> Expr:
        return self

    # -- building -------------------------------------------------------------------------------------------------
    def cast(self, dtype: str) -> Expr:
        """Convert to ``dtype``; returns itself if it has that dtype. Floats become integers by truncation."""
        if dtype == self.dtype:
            return self
        if self.op == "const":
            return const(self.value, dtype)
        return Expr("cast", dtype, (self,))

    def __add__(self, o: Any) -> Expr:
        return call("add", self, o)

    def __radd__(self, o: Any) -> Expr:
        return call("add", o, self)

    def __sub__(self, o: Any) -> Expr:
        return call("sub", self, o)

    def __rsub__(self, o: Any) -> Expr:
        return call("sub", o, self)

    def __mul__(self, o: Any) -> Expr:
        return call("mul", self, o)

    def __rmul__(self, o: Any) -> Expr:
        return call("mul", o, self)

    def __truediv__(self, o: Any) -> Expr:
        return call("div", self, o)

    def __rtruediv__(self, o: Any) -> Expr:
        return call("div", o, self)

    def __floordiv__(self, o: Any) -> Expr:
        return call("floordiv", self, o)

    def __mod__(self, o: Any) -> Expr:
        return call("remainder", self, o)

    def __neg__(self) -> Expr:
        return call("neg", self)

    def __lt__(self, o: Any) -> Expr:
        return call("lt", self, o)

    def __le__(self, o: Any) -> Expr:
        return call("le", self, o)

    def __gt__(self, o: Any) -> Expr:
        return call("gt", self, o)

    def __ge__(self, o: Any) -> Expr:
        return call("ge", self, o)

    def __and__(self, o: Any) -> Expr:
        return call("and", self, o)

    def __or__(self, o: Any) -> Expr:
        return call("or", self, o)

    def __xor__(self, o: Any) -> Expr:
        return call("xor", self, o)

    def __invert__(self) -> Expr:
        return call("not", self)

    def __lshift__(self, o: Any) -> Expr:
        return call("shl", self, o)

    def __rshift__(self, o: Any) -> Expr:
        return call("shr", self, o)

    def __repr__(self) -> str:
        return render(self)


def const(value: Any, dtype: str) -> Expr:
    """Return a literal of ``dtype``; the value is rounded to what the dtype holds."""
    kind = dtypes.DTYPES[dtype].kind
    if kind == "float":
        value = float(value)
    elif kind == "bool":
        value = bool(value)
    else:
        value = int(value)
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"{value} does not fit {dtype}")
    return Expr("const", dtype, (), value)


def constant(e: Expr) -> Any:
    """Return the value of a constant as its dtype holds it; a number that is too large is infinite, as in PyTorch."""
    with np.errstate(over="ignore"):
        return np.array(e.value).astype(dtypes.numpy_dtype(e.dtype)).item()


def index(dim: int) -> Expr:
    """Return the int64 position along dim ``dim`` of the iteration domain."""
    return Expr("index", "int64", (), dim)


def load(operand: int, dtype: str, idx: Sequence[Expr]) -> Expr:
    """Return one element of operand ``operand`` of ``dtype``; ``idx`` has one int64 expression per operand dim."""
    return Expr("load", dtype, idx, operand)


def stage(number: int, dtype: str) -> Expr:
    """Return the result of stage ``number`` of the same kernel: an earlier reduction or temporary."""
    return Expr("stage", dtype, (), number)


def acc(dtype: str = "float32", number: int = 0) -> Expr:
    """Return the accumulator of an anchor; a dual GEMM has a second one, number 1."""
    return Expr("acc", dtype, (), number)


def call(op: str, *args: Any) -> Expr:
    """Apply a scalar op. Python scalars take the dtype of the Expr beside them; all Expr arguments must agree.

    Raises ``TypeError`` if the op has no meaning for their dtype.
    """
    spec = SCALAR_OPS[op]
    assert len(args) == spec.arity, f"{op} takes {spec.arity} arguments"
    operands = args[1:] if op == "where" else args
    dtype = next((a.dtype for a in operands if isinstance(a, Expr)), None)
    if dtype is None:
        dtype = "float32" if any(isinstance(a, float) for a in operands) else "int64"
    if not takes(op, dtype):
        raise TypeError(f"{op!r} of {dtype} numbers has no meaning")
    fixed = [a if isinstance(a, Expr) else const(a, dtype) for a in args]
    for a in fixed[1 if op == "where" else 0 :]:
        assert a.dtype == dtype, f"{op}: mixed dtypes {[x.dtype for x in fixed]}"
    result = {"same": dtype, "bool": "bool", "arg1": dtype}[spec.result]
    return _simplify(Expr(op, result, fixed))


def where(cond: Expr, a: Any, b: Any) -> Expr:
    """Return ``a`` where the bool ``cond`` holds, else ``b``; both have one dtype after scalars are converted."""
    return call("where", cond, a, b)


def behind_if_zero(divisor: Expr) -> Expr:
    """Return 1 if an integer is zero, else 0: an index into a table of one element, which is out of range for a divisor
    of zero. Code generators recognise it and report a division by zero."""
    return where(call("eq", divisor, 0), const(1, "int64"), const(0, "int64"))


def is_behind_if_zero(e: Expr) -> bool:
    """Whether ``e`` is the result of :func:`behind_if_zero`."""
    return e.op == "where" and e.args[0].op == "eq" and e == behind_if_zero(e.args[0].args[0])


def maximum(a: Any, b: Any) -> Expr:
    """Return the larger of two values of one dtype; NaN propagates."""
    return call("maximum", a, b)


def minimum(a: Any, b: Any) -> Expr:
    """Return the smaller of two values of one dtype; NaN propagates."""
    return call("minimum", a, b)


def fn(name: str) -> Callable[..., Expr]:
    """Return a scalar op as a Python function: ``exp = fn('exp')``."""
    return lambda *args: call(name, *args)


def _simplify(e: Expr) -> Expr:
    """Apply exact identities only: integer arithmetic on constants, and neutral elements that keep every bit."""
    a = e.args
    if e.dtype in ("int64", "bool") and a[0].dtype in ("int64", "bool") and all(x.op == "const" for x in a):
        partial = e.op in ("floordiv", "remainder", "idiv", "fmod", "pow", "shl", "shr")
        with np.errstate(all="ignore"):
            if not partial or a[1].value > 0:
                return const(SCALAR_OPS[e.op].numpy(*(np.array(x.value) for x in a)).item(), e.dtype)
    if e.dtype == "int64" and len(a) == 2:
        x, y = a
        if x.op == "const" and e.op in ("add", "mul"):
            x, y = y, x
        if y.op == "const":
            if (e.op in ("add", "sub") and y.value == 0) or (e.op in ("mul", "floordiv") and y.value == 1):
                return x
            if (e.op == "mul" and y.value == 0) or (e.op == "remainder" and y.value == 1):
                return const(0, "int64")
    if e.op == "mul" and dtypes.is_float(e.dtype):
        for x, y in (a, a[::-1]):
            if y.op == "const" and y.value == 1.0:
                return x
    if e.op == "where" and a[0].op == "const":
        return a[1] if a[0].value else a[2]
    if e.op in ("and", "or") and e.dtype == "bool":
        for x, y in (a, a[::-1]):
            if y.op == "const":
                return x if y.value == (e.op == "and") else y
    return e


# -- traversal ----------------------------------------------------------------------------------------------------
def walk(e: Expr) -> tuple[Expr, ...]:
    """Return every distinct subexpression, arguments before users; the root comes last."""
    if e._order is None:
        seen: dict[Expr, None] = {}
        stack = [e]
        while stack:
            x = stack[-1]
            todo = [y for y in x.args if y not in seen] if x not in seen else []
            if todo:
                stack.extend(reversed(todo))
            else:
                seen[x] = None
                stack.pop()
        e._order = (*list(seen)[:-1],)  # without the root: a cycle of references would keep it alive
    return (*e._order, e)


def rewrite(e: Expr, f: Callable[[Expr], Expr | None]) -> Expr:
    """Rebuild bottom-up; ``f`` sees each node with already rewritten arguments and may return a replacement.

    A node that simplifies to one of its arguments, as ``a + 0``, is not shown to ``f``: that argument may be a
    replacement, which must not be replaced again.
    """
    new: dict[Expr, Expr] = {}
    results: set[Expr] = set()
    for x in walk(e):
        y, done = x, False
        if any(new[a] is not a for a in x.args):
            rebuilt = Expr(x.op, x.dtype, [new[a] for a in x.args], x.value)
            y = rebuilt if x.op in ("load", "cast") else _simplify(rebuilt)
            done = y is not rebuilt and y in results
        new[x] = y if done else f(y) or y
        results.add(new[x])
    return new[e]


def substitute(
    e: Expr, dims: dict[int, Expr] | None = None, loads: Callable[[Expr], Expr | None] | None = None
) -> Expr:
    """Replace iteration indices by expressions, and/or whole loads (indices already substituted)."""

    def f(x: Expr) -> Expr | None:
        if x.op == "index" and dims is not None:
            return dims.get(x.value)
        if x.op == "load" and loads is not None:
            return loads(x)
        return None

    return rewrite(e, f)


def operands(e: Expr) -> list[int]:
    """Return the operand numbers that the expression loads, ascending."""
    return sorted({x.value for x in walk(e) if x.op == "load"})


def last_uses(e: Expr) -> dict[Expr, list[Expr]]:
    """Return for each subexpression the arguments that nothing after it, in the order of :func:`walk`, reads."""
    last = {a: x for x in walk(e) for a in x.args}
    found: dict[Expr, list[Expr]] = {}
    for a, x in last.items():
        found.setdefault(x, []).append(a)
    return found


def cost(e: Expr) -> int:
    """Estimate the scalar cost: 1 per operation, 16 per transcendental or integer division, 0 per load or constant."""
    return sum(map(own_cost, walk(e)))


def own_cost(x: Expr) -> int:
    """Estimate the scalar cost of an expression without its operands. See :func:`cost`."""
    if x.op in EXPENSIVE:
        return 16
    return int(x.op not in ("const", "index", "load", "stage", "acc") and x.dtype != "int64")


def identity_index(shape: Sequence[int]) -> tuple[Expr, ...]:
    """Return the indices that read an operand of equal rank element by element; size-1 dims are read at 0."""
    return tuple(index(d) if n != 1 else const(0, "int64") for d, n in enumerate(shape))


def broadcast_index(shape: Sequence[int], rank: int) -> tuple[Expr, ...]:
    """Return the indices that read an operand of ``shape`` broadcast to a domain of ``rank`` dims, as numpy aligns."""
    off = rank - len(shape)
    return tuple(index(d + off) if n != 1 else const(0, "int64") for d, n in enumerate(shape))


def drop_roundings(e: Expr) -> Expr:
    """Remove a narrowing cast whose result is widened again: values that stay inside a kernel stay in float32. Casts to
    float8 remain, because they quantise."""

    def f(x: Expr) -> Expr | None:
        if x.op == "cast" and x.args[0].op == "cast" and x.dtype in ("float32", "float64"):
            inner = x.args[0].args[0]
            narrow = x.args[0].dtype
            if dtypes.is_float(narrow) and narrow != dtypes.FLOAT8 and inner.dtype == x.dtype:
                return inner
        return None

    return rewrite(e, f)


# -- text and serialisation -----------------------------------------------------------------------------------------
def render(e: Expr, limit: int = 1 << 16) -> str:
    """Return a one-line form for dumps and ``describe()``.

    A shared subexpression is repeated wherever it is used, so a few nodes can expand to a text of any length: parts
    longer than ``limit`` characters lose their middle.
    """
    text: dict[Expr, str] = {}
    for x in walk(e):
        whole = _render(x, [text[a] for a in x.args])
        text[x] = whole if len(whole) <= limit else f"{whole[: limit // 2]} … {whole[-limit // 2 :]}"
    return text[e]


def _render(e: Expr, args: list[str]) -> str:
    if e.op == "const":
        return repr(e.value)
    if e.op == "index":
        return f"i{e.value}"
    if e.op == "load":
        return f"in{e.value}[{', '.join(args)}]"
    if e.op in ("stage", "acc"):
        return f"acc{e.value or ''}" if e.op == "acc" else f"r{e.value}"
    if e.op == "cast":
        return f"{e.dtype}({args[0]})"
    infix = SCALAR_OPS[e.op].infix
    return f"({args[0]} {infix} {args[1]})" if infix else f"{e.op}({', '.join(args)})"


def to_list(e: Expr) -> list[list[Any]]:
    """Convert to plain nested lists for msgpack: a table of nodes in evaluation order, arguments by number."""
    order = walk(e)
    number = {x: i for i, x in enumerate(order)}
    return [[x.op, x.dtype, [number[a] for a in x.args], x.value] for x in order]


def from_list(rows: Any) -> Expr:
    """Return the expression of a table that :func:`to_list` made. Raises ``ValueError`` for anything malformed."""
    made: list[Expr] = []
    if not isinstance(rows, list) or not rows:
        raise ValueError("an expression is a non-empty list")
    for i, row in enumerate(rows):
        if not (isinstance(row, list) and len(row) == 4):
            raise ValueError(f"row {i}: expected [op, dtype, args, value]")
        op, dtype, args, value = row
        if dtype not in dtypes.DTYPES or op not in {*SCALAR_OPS, "const", "index", "load", "stage", "acc"}:
            raise ValueError(f"row {i}: unknown op {op!r} or dtype {dtype!r}")
        if not isinstance(args, list) or not all(isinstance(a, int) and 0 <= a < i for a in args):
            raise ValueError(f"row {i}: arguments must be earlier rows")
        if op in SCALAR_OPS and len(args) != SCALAR_OPS[op].arity:
            raise ValueError(f"row {i}: {op} takes {SCALAR_OPS[op].arity} arguments")
        if op in ("index", "load", "stage") and not (isinstance(value, int) and value >= 0):
            raise ValueError(f"row {i}: {op} needs a number")
        if op == "const" and not isinstance(value, int | float | bool):
            raise ValueError(f"row {i}: const needs a number")
        made.append(Expr(op, dtype, [made[a] for a in args], value))
    return made[-1]
