"""Scalar expressions as statements of a SIMT kernel, in which a thread computes one element."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ....graph import affine, expr
from ....graph.affine import INT32, Affine
from ....graph.expr import Expr, is_behind_if_zero
from ....graph.scalar_ops import EXPENSIVE, SCALAR_OPS
from ....support import dtypes
from ...codegen.nest import Nest
from ...codegen.rounding import rounded_clamp
from .lines import Lines

INLINE_LENGTH = 100  # longer texts get a name
SHORT_ARM = 16  # ops of an arm that lanes of the other may compute in vain: a branch takes about as long
_BOOL = {
    "add": "({0} || {1})", "or": "({0} || {1})", "maximum": "({0} || {1})", "and": "({0} && {1})",
    "mul": "({0} && {1})", "minimum": "({0} && {1})", "xor": "({0} != {1})", "ne": "({0} != {1})",
    "sub": "({0} != {1})", "eq": "({0} == {1})", "lt": "(!{0} && {1})", "gt": "({0} && !{1})",
    "le": "(!{0} || {1})", "ge": "({0} || !{1})", "not": "(!{0})",
}  # fmt: skip


class Value(NamedTuple):
    """A C++ expression and the type of the register that holds it: 'float', 'double', 'int', 'int64_t' or 'bool'."""

    text: str
    kind: str


def kind_of(dtype: str) -> str:
    """Return the register type for values of ``dtype``: 'float' for narrow floats, 'int' for small integers."""
    if dtype == "bool":
        return "bool"
    if dtypes.is_float(dtype):
        return "double" if dtype == "float64" else "float"
    return "int64_t" if dtype == "int64" else "int"


def ctype(dtype: str) -> str:
    """Return the C++ type of an element in memory."""
    return dtypes.DTYPES[dtype].ctype


def literal(value: Any, kind: str) -> str:
    """Return the C++ constant for ``value`` in register type ``kind``; NaN and infinities are calls."""
    if kind in ("float", "double"):
        number = np.float32(value) if kind == "float" else np.float64(value)
        if np.isnan(number):
            return f"m_nan_{kind}()"
        text = f"m_inf_{kind}()" if np.isinf(number) else str(abs(number)) + ("f" if kind == "float" else "")
        return f"(-{text})" if np.signbit(number) else text
    if kind == "bool":
        return "true" if value else "false"
    value = int(value)
    if kind == "int64_t":
        if value == -(2**63):
            return "((int64_t)(-9223372036854775807L - 1))"
        return f"((int64_t){value}L)"
    if value == -(2**31):
        return "(-2147483647 - 1)"
    return f"({value})" if value < 0 else str(value)


def convert(v: Value, kind: str) -> str:
    """Return the C++ expression for ``v`` in register type ``kind``."""
    if v.kind == kind:
        return v.text
    return f"({v.text} != 0)" if kind == "bool" else f"({kind}){v.text}"


def wrap(text: str, dtype: str) -> str:
    """Wrap a register to the range of a small integer type, or round it to a narrow float."""
    if dtypes.is_narrow(dtype):
        return f"round_{dtypes.DTYPES[dtype].ctype}({text})"
    return f"(int)({dtypes.DTYPES[dtype].ctype})({text})" if dtype in ("int8", "uint8", "int16") else text


def read(pointer: str, offset: str, dtype: str) -> Value:
    """Return the load of one element of device or shared memory into a register."""
    return stored(f"{pointer}[{offset}]", dtype)


def stored(text: str, dtype: str) -> Value:
    """Return a value of storage type ``dtype`` as a register."""
    kind = kind_of(dtype)
    if dtypes.is_narrow(dtype):
        return Value(f"to_f32({text})", kind)
    if dtype == "bool":
        return Value(f"({text} != 0)", kind)
    return Value(f"(int){text}" if kind == "int" and dtype != "int32" else text, kind)


def storage(text: str, dtype: str) -> str:
    """Convert a register of type ``kind_of(dtype)`` to the storage type."""
    ctype = dtypes.DTYPES[dtype].ctype
    if dtypes.is_narrow(dtype):
        return f"to_{ctype}({text})"
    return f"({ctype})({text})" if dtype in ("bool", "int8", "uint8", "int16") else text


def before_storage(e: Expr) -> Expr:
    """Return ``e`` without the rounding that its store repeats."""
    rounds = e.op == "cast" and dtypes.is_narrow(e.dtype) and e.args[0].dtype == "float32"
    return e.args[0] if rounds else e


class Scalars:
    """Renders expressions of a nest as statements of ``out``. Dims are C++ variables ``i{dim}``.

    ``pointers``: pointer names by operand number, ``~n`` for output n. ``uses``: how often each expression is used.
    ``bound``: expressions whose values are in named variables. ``fast``: scalar ops for which the ``_fast`` function is
    used. ``straight``: no branches are emitted; a load that a branch would skip reads the first element instead.
    """

    def __init__(self, nest: Nest, pointers: Mapping[int, str], out: Lines, uses: Mapping[Expr, int] | None = None):
        self.nest, self.pointers, self.out = nest, pointers, out
        self.uses: Mapping[Expr, int] = uses if uses is not None else Counter()
        self.ranges = nest.ranges
        self.bound: dict[Expr, Value] = {}
        self.fast: Collection[str] = ()
        self.straight = False
        self._when = ""  # in straight code: the condition under which the value is used
        self.checks = False  # whether a statement reports an index out of range or a divisor of zero
        self._scopes: list[dict[Expr, Value]] = [{}]
        self._count = 0
        self._pinned: dict[Expr, bool] = {}

    @contextmanager
    def scope(self, header: str = "", footer: str = "}") -> Iterator[None]:
        """Forget at the end which expressions were named inside. With ``header``, also open a block."""
        self._scopes.append({})
        if header:
            with self.out.block(header, footer):
                yield
        else:
            yield
        self._scopes.pop()

    def name(self) -> str:
        """Return an unused variable name."""
        self._count += 1
        return f"t{self._count}"

    def value(self, e: Expr) -> Value:
        """Return ``e`` as a variable, a constant or a short expression; emit the statements that it needs."""
        if e in self.bound:
            return self.bound[e]
        for scope in reversed(self._scopes):
            if e in scope:
                return scope[e]
        if e.op == "const":
            kind = kind_of(e.dtype)
            if kind == "int64_t" and INT32[0] <= e.value <= INT32[1]:
                kind = "int"
            return Value(literal(expr.constant(e), kind), kind)
        if e.op == "index":
            return Value(f"i{e.value}", "int")
        made = self._make(e)
        repeated = self.uses.get(e, 2) > 1 or e.op == "load"
        if not made.text.isidentifier() and (repeated or len(made.text) > INLINE_LENGTH):
            made = self.define(made)
        self._scopes[-1][e] = made
        return made

    def define_row_values(self, values: Iterable[Expr]) -> None:
        """Define variables for the parts of ``values`` that only depend on reductions of the row, before a loop over
        its points. C++ compilers do not move all of them, such as divisions, out of the loop."""
        for e in values:
            if self._of_row(e):
                if e.op not in ("stage", "const") and not (made := self.value(e)).text.isidentifier():
                    self._scopes[-1][e] = self.define(made)
            elif e.op != "load":
                self.define_row_values(e.args)

    def _of_row(self, e: Expr) -> bool:
        """Whether only reductions that are known, and constants, determine ``e``."""
        leaves = [x for x in expr.walk(e) if not x.args]
        return all(x.op == "const" or (x.op == "stage" and x in self.bound) for x in leaves)

    def define(self, v: Value) -> Value:
        """Define a constant with the value ``v`` and return it."""
        name = self.name()
        self.out.add(f"const {v.kind} {name} = {v.text};")
        return Value(name, v.kind)

    def text(self, e: Expr, kind: str) -> str:
        """Return the C++ expression for ``e`` in register type ``kind``."""
        if e.op == "const" and e not in self.bound:
            return literal(expr.constant(e), kind)
        return convert(self.value(e), kind)

    def store(self, target: Expr, value: Expr, dtype: str) -> None:
        """Store ``value`` at the address of ``target``, a load of an output, as ``dtype``."""
        text = self.in_memory(value, dtype)
        self.out.add(f"{self.pointers[target.value.operand]}[{self.address(target)}] = {text};")

    def in_memory(self, value: Expr, dtype: str) -> str:
        """Return the C++ expression of ``value`` as it is stored in memory."""
        return storage(self.text(before_storage(value) if value.dtype == dtype else value, kind_of(dtype)), dtype)

    # -- one expression -----------------------------------------------------------------------------------------------
    def kind(self, e: Expr) -> str:
        """Return the register type in which ``e`` is computed."""
        if e in self.bound:
            return self.bound[e].kind
        return "int" if e.dtype == "int64" and affine.fits_int32(e, self.ranges) else kind_of(e.dtype)

    def pinned(self, e: Expr) -> bool:
        """Whether ``e`` must stay in its branch, because it could read out of bounds outside."""
        found = self._pinned.get(e)
        if found is None:
            found = any(self.pinned(a) for a in e.args)
            if e.op == "load" and e not in self.bound:
                found = found or e.value.guarded or bool(e.value.checks)
            self._pinned[e] = found
        return found

    def _make(self, e: Expr) -> Value:
        if e.op == "load":
            at = self.address(e)
            at = f"{self._when} ? {at} : 0" if self._when and e.value.guarded else at
            return read(self.pointers[e.value.operand], at, e.dtype)
        if e.op == "cast":
            return self._cast(e)
        if e.op == "where":
            return self._where(e)
        if e.args[0].dtype == "bool":
            return Value(_BOOL[e.op].format(*(self.text(a, "bool") for a in e.args)), "bool")
        if e.dtype == "bool":
            return self._compare(e)
        kind = self.kind(e)
        args = [self.text(a, kind) for a in e.args]
        return Value(wrap(self._arithmetic(e, kind, args), e.dtype), kind)

    def _compare(self, e: Expr) -> Value:
        kinds = {self.kind(a) for a in e.args if a.op != "const"} or {kind_of(e.args[0].dtype)}
        kind = next(k for k in ("float", "double", "int64_t", "int", "bool") if k in kinds)
        wide = [a for a in e.args if a.op == "const" and kind == "int" and not INT32[0] <= a.value <= INT32[1]]
        kind = "int64_t" if wide else kind
        args = [self.text(a, kind) for a in e.args]
        if e.op in ("isnan", "isinf"):
            return Value(f"m_{e.op}({args[0]})", "bool")
        return Value(f"({args[0]} {SCALAR_OPS[e.op].infix} {args[1]})", "bool")

    def _arithmetic(self, e: Expr, kind: str, args: list[str]) -> str:
        op, floating = e.op, kind in ("float", "double")
        if floating and op in ("add", "sub", "mul", "div"):
            return f"({args[0]} {SCALAR_OPS[op].infix} {args[1]})"
        if op in ("add", "sub", "mul"):
            if any(x.op in ("load", "stage", "cast") for x in expr.walk(e)):
                return f"{op}_wrapping({args[0]}, {args[1]})"
            return f"({args[0]} {SCALAR_OPS[op].infix} {args[1]})"
        if op in ("and", "or", "xor"):
            return f"({args[0]} {SCALAR_OPS[op].infix} {args[1]})"
        if op in ("neg", "not"):
            return f"({'-' if op == 'neg' else '~'}{args[0]})"
        if not floating and op in ("idiv", "fmod", "floordiv", "remainder"):
            b = e.args[1]
            bound = affine.interval(e.args[0], self.ranges) if e.dtype == "int64" else None
            if b.op == "const" and b.value > 0 and (op in ("idiv", "fmod") or (bound is not None and bound[0] >= 0)):
                return f"({args[0]} {'/' if op in ('idiv', 'floordiv') else '%'} {args[1]})"
        return f"m_{op}{'_fast' if kind == 'float' and op in self.fast else ''}({', '.join(args)})"

    def _cast(self, e: Expr) -> Value:
        source, kind = e.args[0], self.kind(e)
        if kind == "int" and source not in self.bound and (found := rounded_clamp(source)) is not None:
            _, _, low, high = found
            bounds, text = np.iinfo(dtypes.numpy_dtype(e.dtype)), self._rounded(found, "round_clamped")
            return Value(text if bounds.min <= low <= high <= bounds.max else wrap(text, e.dtype), kind)
        value = self.value(source)
        text = convert(value, kind)
        if dtypes.is_narrow(e.dtype) and source.dtype == e.dtype:
            return value
        shrinks = e.dtype != source.dtype and source.dtype != "bool"
        return Value(wrap(text, e.dtype) if shrinks else text, kind)

    def _rounded(self, found: tuple[Expr, int, int, int], function: str) -> str:
        x, zero, low, high = found
        if function == "round_clamped_float":
            numbers = ", ".join(literal(n, "float") for n in (low - zero, high - zero, zero))
            return f"{function}({self.text(x, 'float')}, {numbers})"
        if zero and function == "round_clamped_bits":
            function = "round_clamped"  # zero is added before results saturate
        bounds = ", ".join(literal(b - zero, "float") for b in (low, high))
        text = f"{function}({self.text(x, 'float')}, {bounds})"
        return f"({text} + {literal(zero, 'int')})" if zero else text

    def register(self, e: Expr) -> str:
        """Return the C++ expression for a result of type ``kind_of(e.dtype)``. An 8-bit integer is what it is after
        saturation, or only its low byte counts; as a float it has been rounded."""
        byte, function = e, "round_clamped_bits"
        if e.op == "cast" and e.dtype == "float32":
            byte, function = e.args[0], "round_clamped_float"
        found = rounded_clamp(byte.args[0]) if byte.op == "cast" and byte.dtype in ("int8", "uint8") else None
        return self._rounded(found, function) if found is not None else self.text(e, kind_of(e.dtype))

    def _where(self, e: Expr) -> Value:
        cond, *arms = e.args
        kind = self.kind(e)
        test = self.text(cond, "bool")
        for shared in self._shared(*arms):
            self.value(shared)
        if not any(self.pinned(a) or self._expensive(a) or self._is_long(a) for a in arms):
            return Value(f"({test} ? {self.text(arms[0], kind)} : {self.text(arms[1], kind)})", kind)
        if self.straight:
            around, texts = self._when, []
            for arm, when in zip(arms, (test, f"!{test}"), strict=True):
                self._when = f"{around} && {when}" if around else when
                with self.scope():
                    texts.append(self.text(arm, kind))
            self._when = around
            return Value(f"({test} ? {texts[0]} : {texts[1]})", kind)
        name = self.name()
        self.out.add(f"{kind} {name};")
        for arm, header in zip(arms, (f"if ({test}) {{", "else {"), strict=True):
            with self.scope(header):
                self.out.add(f"{name} = {self.text(arm, kind)};")
        return Value(name, kind)

    def _named(self, e: Expr) -> bool:
        return e in self.bound or any(e in scope for scope in self._scopes)

    def _expensive(self, e: Expr) -> bool:
        """Whether an expensive op is left to compute for ``e``."""
        return any(x.op in EXPENSIVE for x in self._left(e))

    def _is_long(self, e: Expr) -> bool:
        return sum(bool(x.args) for x in self._left(e)) > SHORT_ARM

    def _left(self, e: Expr, always: bool = False) -> dict[Expr, None]:
        """Return ``e`` and its parts, as far as they have no name yet; ``always``: without the arms of a ``where``."""
        found: dict[Expr, None] = {}
        left = [e]
        while left:
            x = left.pop()
            if x not in found and not self._named(x):
                found[x] = None
                left += x.args[:1] if always and x.op == "where" else x.args
        return found

    def _shared(self, a: Expr, b: Expr) -> list[Expr]:
        """Return the expensive expressions that both arms of a ``where`` compute. Inside of the branches, the lanes of
        one would wait until those of the other have computed them too."""
        first, second = (self._left(arm, always=True) for arm in (a, b))
        shared = [x for x in first if x in second and not self.pinned(x) and self._expensive(x)]
        inner = {part for x in shared for part in x.args}
        return [x for x in shared if x not in inner]

    # -- addresses ------------------------------------------------------------------------------------------------
    def address(self, e: Expr) -> str:
        """Return the offset of a load or store target in elements. Data-dependent indices are checked."""
        form = affine.affine(e.args[0])
        text = self.offset(form)
        for idx, (n, step) in zip(e.args[1:], e.value.checks, strict=True):
            self.checks = True
            if n == 0:
                self.out.add("set_flag(bad);")
                continue
            at = self.define(self._checked(idx, n, step)).text
            part = at if step == 1 else f"{at} * {step}"
            text = part if text == "0" else f"{text} + {part}"
        return text

    def _checked(self, idx: Expr, n: int, step: int) -> Value:
        """Return a data-dependent index, or 0 if it is out of range: in 32 bits if these hold every offset. Floats are
        compared before they are converted, which is slow to 64 bits."""
        kind = "int" if n * abs(step) < 2**31 else "int64_t"
        flag = "bad + 1" if is_behind_if_zero(idx) else "bad"
        source = idx.args[0] if idx.op == "cast" and idx not in self.bound else None
        if source is not None and self.kind(source) == "float" and n <= 1 << 24:
            return Value(f"checked_float({self.text(source, 'float')}, {n}, {flag})", "int")
        return Value(f"({kind})checked({self.text(idx, 'int64_t')}, {n}, {flag})", kind)

    def offset(self, form: Affine) -> str:
        """Return the C++ expression of an affine form, in 32 bits if its range allows it."""
        bound = affine.interval(form.build(), self.ranges)
        wide = bound is None or not (INT32[0] <= bound[0] and bound[1] <= INT32[1])
        kind = "int64_t" if wide else "int"
        words = []
        for t, c in sorted(form.terms.items(), key=lambda tc: (tc[0].op != "index", str(tc[0].value))):
            text = self.text(t, kind)
            words.append(text if c == 1 else f"{text} * {c}" if c > 0 else f"{text} * ({c})")
        total = " + ".join(words)
        if form.const:
            total = f"{total} {'+' if form.const > 0 else '-'} {abs(form.const)}" if total else str(form.const)
        return total or "0"


def accumulator(kind: str, dtype: str) -> str:
    """Return the initial value of reduction ``kind``."""
    register = kind_of(dtype)
    if kind in ("sum", "prod"):
        return literal(int(kind == "prod"), register)
    least, greatest = dtypes.extremes(dtype)
    return literal(least if kind in ("max", "argmax", "logaddexp") else greatest, register)


def combine(kind: str, register: str, a: str, b: str) -> str:
    """Return the combination of ``a`` and ``b`` in reduction ``kind``."""
    if register == "bool":
        return f"({a} {'|' if kind in ('sum', 'max') else '&'} {b})"  # no short-circuit: lanes stay converged
    if kind in ("max", "min"):
        return f"m_{kind}imum({a}, {b})"
    if kind == "logaddexp":
        return f"m_logaddexp({a}, {b})"
    floating = register in ("float", "double")
    return (
        f"({a} {'+' if kind == 'sum' else '*'} {b})"
        if floating
        else f"{'add' if kind == 'sum' else 'mul'}_wrapping({a}, {b})"
    )
