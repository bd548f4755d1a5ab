"""Scalar expressions to C++ on lane vectors, each part placed in the outermost block of the loop nest where it is known.

Values come in these kinds. Varying along the lane dim: ``vf``, ``vd``, ``vi32``, ``vi64`` and ``mask`` (a bool as vi32
0/-1). The same for all lanes: ``vf`` and ``vd`` again (splat), and the scalars ``long``, ``int`` and ``bool``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ... import affine, dtypes, expr
from ...affine import Affine
from ...expr import EXPENSIVE, Expr
from .nest import Access, Nest

INLINE_LENGTH = 72  # longer texts get a name
INT32 = (-(2**31), 2**31 - 1)

SCALAR_OF = {"vf": "float", "vd": "double", "vi32": "int", "vi64": "long", "mask": "bool"}
CTYPE = {"mask": "vi32"}
FUNCTIONS = {"maximum": "max", "minimum": "min"}
# Results in the range of the arguments' type that need no rounding to it.
EXACT = frozenset("maximum minimum and or xor shr sign".split())
_BOOL = {
    "add": "({0} | {1})", "or": "({0} | {1})", "maximum": "({0} | {1})", "and": "({0} & {1})", "mul": "({0} & {1})",
    "minimum": "({0} & {1})", "xor": "({0} ^ {1})", "ne": "({0} ^ {1})", "sub": "({0} ^ {1})", "eq": "{not}({0} ^ {1})",
    "lt": "({not}{0} & {1})", "gt": "({0} & {not}{1})", "le": "({not}{0} | {1})", "ge": "({0} | {not}{1})", "not": "{not}{0}",
}  # fmt: skip


class Value(NamedTuple):
    text: str
    kind: str


class Block:
    """A block of C++ under construction. ``binds``: what becomes known in it: dims, or 'row' for reduction results."""

    def __init__(self, parent: Block | None, header: str, footer: str = "}", binds: frozenset[Any] = frozenset(), kind: str = "loop"):
        self.parent, self.header, self.footer, self.binds, self.kind = parent, header, footer, binds, kind
        self.items: list[str | Block] = []
        self.values: dict[Expr, Value] = {}
        self.offsets: dict[Any, str] = {}
        self.mask = ""

    @property
    def branch(self) -> bool:
        return self.kind != "loop"

    def chain(self) -> Iterator[Block]:
        block: Block | None = self
        while block is not None:
            yield block
            block = block.parent

    def lines(self, indent: int = 0) -> Iterator[str]:
        inner = indent
        if self.header:
            yield from ("  " * indent + line for line in self.header.splitlines())
            inner += 1
        for item in self.items:
            if isinstance(item, Block):
                yield from item.lines(inner)
            else:
                yield "  " * inner + item
        if self.header:
            yield "  " * indent + self.footer

    @contextmanager
    def child(self, header: str, footer: str = "}", binds: frozenset[Any] = frozenset(), kind: str = "loop") -> Iterator[Block]:
        """A nested block. What is hoisted out of it while it is open lands before it."""
        block = Block(self, header, footer, binds, kind)
        yield block
        self.items.append(block)


def literal(value: Any, kind: str) -> str:
    """A C++ constant of a scalar type or of the lanes of a vector kind."""
    kind = SCALAR_OF.get(kind, kind)
    if kind in ("float", "double"):
        suffix = "f" if kind == "float" else ""
        number = np.float32(value) if kind == "float" else np.float64(value)
        if np.isnan(number):
            return f'__builtin_nan{suffix}("")'
        text = f"__builtin_inf{suffix}()" if np.isinf(number) else str(abs(number)) + suffix
        return f"(-{text})" if np.signbit(number) else text
    if kind == "bool":
        return "true" if value else "false"
    value = int(value)
    if value == -(2**63):
        return "INT64_MIN"
    text = f"{value}{'L' if kind == 'long' else ''}"
    if value == -(2**31) and kind == "int":
        text = "INT32_MIN"
    return f"({text})" if value < 0 else text


def vector_kind(dtype: str) -> str:
    if dtype == "bool":
        return "mask"
    if dtypes.is_float(dtype):
        return "vd" if dtype == "float64" else "vf"
    return "vi64" if dtype == "int64" else "vi32"


def uniform_kind(dtype: str) -> str:
    kind = vector_kind(dtype)
    return kind if kind in ("vf", "vd") else SCALAR_OF[kind]


def wrap(text: str, dtype: str) -> str:
    """Brings an int32 lane or scalar back into the range of a smaller type."""
    return f"wrap<{dtypes.DTYPES[dtype].ctype}>({text})" if dtype in ("int8", "uint8", "int16") else text


class Renderer:
    """Emits expressions of one kernel. ``lane`` is the dim of the vector lanes (None: everything is uniform)."""

    def __init__(self, nest: Nest, inputs: list[str], lane: int | None, wide: bool, uses: Mapping[Expr, int]):
        self.nest, self.inputs, self.lane, self.wide, self.uses = nest, inputs, lane, wide, uses
        self.ranges = nest.ranges
        self.stages: dict[Expr, tuple[frozenset[Any], Value]] = {}  # reduction results and saved temporaries
        self.count = 0
        self.can_fail = False
        self.written = {op.buffer.id for op in nest.outputs}
        self._deps: dict[Expr, frozenset[Any]] = {}
        self._pinned: dict[Expr, bool] = {}

    def name(self, prefix: str = "t") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    # -- where an expression is known ---------------------------------------------------------------------------------
    def deps(self, e: Expr) -> frozenset[Any]:
        """The dims (and 'row') that a value depends on."""
        if e in self.stages:
            return self.stages[e][0]
        found = self._deps.get(e)
        if found is None:
            if e.op == "index":
                found = frozenset((e.value,))
            elif e.dtype == "int64" and e.op in ("add", "sub", "mul", "neg") and list(affine.affine(e).terms) != [e]:
                found = self._union(affine.affine(e).terms)
            elif e.op == "load":
                found = self._union((*affine.affine(e.args[0]).terms, *e.args[1:]))
                if self._changes(e.value.operand):
                    found = frozenset((*self.nest.order, "row"))
            else:
                found = self._union(e.args)
            self._deps[e] = found
        return found

    def _changes(self, operand: int) -> bool:
        """Whether what an operand holds changes from row to row: saved temporaries, and what a serial nest updates."""
        if operand >= len(self.nest.inputs):
            return True
        return operand >= 0 and self.nest.serial and self.nest.inputs[operand].buffer.id in self.written

    def _union(self, parts: Any) -> frozenset[Any]:
        return frozenset().union(*(self.deps(p) for p in parts))

    def varying(self, e: Expr) -> bool:
        return self.lane is not None and self.lane in self.deps(e)

    def pinned(self, e: Expr) -> bool:
        """Whether computing it outside its branch could fail or read out of bounds."""
        found = self._pinned.get(e)
        if found is None:
            found = any(self.pinned(a) for a in e.args)
            if e.op == "load":
                found = found or e.value.guarded or bool(e.value.checks)
            self._pinned[e] = found
        return found

    def home(self, e: Expr, block: Block) -> Block:
        """The outermost block, from ``block`` outwards, where ``e`` can be computed."""
        deps, pinned = self.deps(e), self.pinned(e)
        crossed, inside, nearest = False, None, None
        for b in block.chain():
            crossed |= b.branch
            if b.kind == "mask":
                continue
            inside = inside or b
            if b.branch:
                continue
            nearest = nearest or b
            if b.parent is None or b.binds & deps:
                if crossed and pinned:
                    return block
                return inside if b is nearest else b
        raise AssertionError("a block chain ends in the function")

    # -- values -----------------------------------------------------------------------------------------------------
    def value(self, e: Expr, block: Block) -> Value:
        """A name, literal or short text for ``e``, valid in ``block``."""
        if e in self.stages:
            return self.stages[e][1]
        for b in block.chain():
            if e in b.values:
                return b.values[e]
        if e.op == "const":
            return Value(repr(e.value), "const")
        home = self.home(e, block)
        made = self._make(e, home)
        short = len(made.text) <= INLINE_LENGTH and home is block and self.uses.get(e, 2) <= 1
        if made.text.isidentifier() or (short and e.op != "load") or (e.op == "index" and made.kind == "long"):
            if made.text.isidentifier():
                home.values[e] = made
            return made
        return self.define(e, made, home)

    def define(self, e: Expr, made: Value, home: Block) -> Value:
        name = self.name()
        home.items.append(f"const {CTYPE.get(made.kind, made.kind)} {name} = {_strip(made.text)};")
        home.values[e] = Value(name, made.kind)
        return home.values[e]

    def text(self, e: Expr, kind: str, block: Block) -> str:
        """``e`` converted to ``kind``: a vector kind, or a scalar type for a uniform value."""
        if e.op == "const":
            return self.constant(e, kind)
        return convert(self.value(e, block), kind)

    def constant(self, e: Expr, kind: str) -> str:
        if kind == "mask":
            return "(vi32{} - 1)" if e.value else "vi32{}"
        text = literal(np.array(e.value).astype(dtypes.numpy_dtype(e.dtype)).item(), kind)
        return f"splat<{kind}>({text})" if kind.startswith("v") else text

    def kind(self, e: Expr) -> str:
        """The kind ``e`` has when it is computed."""
        if e in self.stages:
            return self.stages[e][1].kind
        if not self.varying(e):
            return uniform_kind(e.dtype)
        return "vi32" if e.dtype == "int64" and self.narrow(e) else vector_kind(e.dtype)

    def narrow(self, e: Expr) -> bool:
        """An int64 index expression whose every part fits 32 bits: half as many registers."""
        if e.op in ("load", "stage", "cast"):
            return False
        bound = affine.interval(e, self.ranges)
        return bound is not None and bound[0] >= INT32[0] and bound[1] <= INT32[1] and all(self.narrow(a) for a in e.args if a.dtype == "int64")

    # -- one expression -----------------------------------------------------------------------------------------------
    def _make(self, e: Expr, block: Block) -> Value:
        if e.op == "index":
            if e.value == self.lane:
                return Value(f"lane_index<{self.kind(e)}>(i{e.value})", self.kind(e))
            return Value(f"i{e.value}", "long")
        if e.op == "load":
            return self._load(e, block)
        if e.op == "cast":
            return self._cast(e, block)
        if e.op == "where":
            return self._where(e, block)
        if e.args[0].dtype == "bool":
            varying = self.varying(e)
            args = [self.text(a, "mask" if varying else "bool", block) for a in e.args]
            pattern = _BOOL[e.op].replace("{not}", "~" if varying else "!")
            return Value(pattern.format(*args), "mask" if varying else "bool")
        if e.dtype == "bool":
            return self._compare(e, block)
        kind = self.kind(e)
        text = self._arithmetic(e, kind, block)
        return Value(text if e.op in EXACT else self._round(text, e.dtype), kind)

    def _operand_kind(self, e: Expr) -> str:
        """The kind in which a comparison works."""
        kinds = {self.kind(a) for a in e.args if a.op != "const"}
        for kind in ("vf", "vd", "vi64", "vi32", "long", "int"):
            if kind in kinds:
                varying = kind.startswith("v")
                if varying and "long" in kinds and kind == "vi32" and not all(self.narrow(a) for a in e.args):
                    return "vi64"
                return kind
        return uniform_kind(e.args[0].dtype)

    def _compare(self, e: Expr, block: Block) -> Value:
        kind = self._operand_kind(e)
        if e.op == "isnan":
            a = self.text(e.args[0], kind, block)
            parts = f"{a} != {a}"
        elif e.op == "isinf":
            parts = f"abs({self.text(e.args[0], kind, block)}) == {literal(math.inf, kind)}"
        else:
            a, b = (self._infix_operand(x, kind, block, e) for x in e.args)
            parts = f"{a} {expr.SCALAR_OPS[e.op].infix} {b}"
        if not self.varying(e):
            return Value(f"(({parts})[0] != 0)" if kind in ("vf", "vd") else f"({parts})", "bool")
        return Value(f"cvt<vi32>({parts})" if kind in ("vd", "vi64") else f"({parts})", "mask")

    def _infix_operand(self, x: Expr, kind: str, block: Block, parent: Expr) -> str:
        others = [a for a in parent.args if a is not x]
        if x.op == "const" and others and others[0].op != "const":
            return self.constant(x, SCALAR_OF.get(kind, kind))
        return self.text(x, kind, block)

    def _arithmetic(self, e: Expr, kind: str, block: Block) -> str:
        op = e.op
        vector = kind.startswith("v")
        floating = kind in ("vf", "vd")
        if op in ("add", "sub", "mul", "div", "and", "or", "xor") or (op in ("shl", "shr") and self._small_shift(e)):
            a, b = (self._infix_operand(x, kind, block, e) for x in e.args)
            if not floating and op in ("add", "sub", "mul") and any(x.op == "load" for x in expr.walk(e)):
                return f"{op}_wrapping({self.text(e.args[0], kind, block)}, {self.text(e.args[1], kind, block)})"
            return f"({a} {expr.SCALAR_OPS[op].infix} {b})"
        args = [self.text(a, kind, block) for a in e.args]
        if op == "neg":
            return f"(-{args[0]})"
        if op == "not":
            return f"(~{args[0]})"
        if not floating and op in ("idiv", "fmod", "floordiv", "remainder"):
            return self._divide(e, kind, args)
        name = FUNCTIONS.get(op, op)
        if vector:
            return f"{name}({', '.join(args)})"
        if op == "pow":
            return f"Integer<{kind}>::pow({', '.join(args)})"
        return f"scalar_{name}({', '.join(args)})"

    def _small_shift(self, e: Expr) -> bool:
        by = e.args[1]
        return by.op == "const" and 0 <= by.value < 8 * min(4, dtypes.DTYPES[e.dtype].size)

    def _divide(self, e: Expr, kind: str, args: list[str]) -> str:
        a, b = e.args
        if b.op == "const" and b.value > 0:
            bound = affine.interval(a, self.ranges) if a.dtype == "int64" else None
            if e.op in ("idiv", "fmod") or (bound is not None and bound[0] >= 0):
                sign = "/" if e.op in ("idiv", "floordiv") else "%"
                return f"({args[0]} {sign} {literal(b.value, kind)})"
        if kind.startswith("v"):
            return f"{e.op}({args[0]}, {args[1]})"
        return f"Integer<{'int64_t' if kind == 'long' else 'int32_t'}>::{e.op}({args[0]}, {args[1]})"

    def _round(self, text: str, dtype: str) -> str:
        if dtype in ("float16", "bfloat16"):
            return f"round_to<{dtypes.DTYPES[dtype].ctype}>({text})"
        return wrap(text, dtype)

    def _cast(self, e: Expr, block: Block) -> Value:
        source, target = e.args[0], e.dtype
        kind = self.kind(e)
        value = self.value(source, block)
        if source.op == "const":
            value = Value(self.constant(source, self.kind(source)), self.kind(source))
        if target == "bool":
            zero = f"{value.text} != 0"
            if value.kind in ("mask", "bool"):
                return value
            if not self.varying(e):
                return Value(f"(({zero})[0] != 0)" if value.kind in ("vf", "vd") else f"({zero})", "bool")
            return Value(f"cvt<vi32>({zero})" if value.kind in ("vd", "vi64") else f"({zero})", "mask")
        if value.kind in ("vf", "vd") and not self.varying(e) and not dtypes.is_float(target):
            return Value(wrap(f"({'long' if kind == 'long' else 'int'}){value.text}[0]", target), kind)
        if value.kind == "vf" and kind == "vf" and not (target in ("float16", "bfloat16") and source.dtype != target):
            return value
        text = convert(value, kind)
        if dtypes.is_float(target):
            return Value(self._round(text, target) if target in ("float16", "bfloat16") else text, kind)
        shrinks = source.dtype != "bool" and dtypes.DTYPES[target].size <= 2
        return Value(wrap(text, target) if shrinks else text, kind)

    # -- branches -----------------------------------------------------------------------------------------------------
    def _where(self, e: Expr, block: Block) -> Value:
        cond, *arms = e.args
        kind = self.kind(e)
        if self.varying(cond):
            mask = self.text(cond, "mask", block)
            if any(self.pinned(a) for a in arms):
                if not mask.isidentifier():
                    mask = self.define(cond, Value(mask, "mask"), block).text
                a, b = (self._under_mask(x, kind, m, block) for x, m in zip(arms, (mask, f"~{mask}"), strict=True))
            else:
                a, b = (self.text(x, kind, block) for x in arms)
            return Value(f"select({mask}, {a}, {b})", kind)
        test = self.text(cond, "bool", block)
        if not any(self.pinned(a) or self._worth_branching(a, block) for a in arms):
            return Value(f"({test} ? {self.text(arms[0], kind, block)} : {self.text(arms[1], kind, block)})", kind)
        name = self.name()
        block.items.append(f"{CTYPE.get(kind, kind)} {name};")
        if not test.isidentifier():
            test = _strip(test)
        for arm, header in zip(arms, (f"if ({test}) {{", "else {"), strict=True):
            with block.child(header, kind="branch") as inner:
                inner.mask = block.mask
                inner.items.append(f"{name} = {_strip(self.text(arm, kind, inner))};")
        return Value(name, kind)

    def _worth_branching(self, e: Expr, block: Block) -> bool:
        """Whether an arm does work at this very place that a branch can save."""
        loop = next(b for b in block.chain() if not b.branch)
        for x in expr.walk(e):
            if (x.op == "load" or x.op in EXPENSIVE) and not any(x in b.values for b in block.chain()):
                if self.home(x, loop) is loop:
                    return True
        return False

    def _under_mask(self, e: Expr, kind: str, mask: str, block: Block) -> str:
        if not self.pinned(e):
            return self.text(e, kind, block)
        with block.child("", "", kind="mask") as inner:
            if block.mask:
                inner.mask = self.name("m")
                inner.items.append(f"const vi32 {inner.mask} = {block.mask} & {mask};")
            else:
                inner.mask = mask if mask.isidentifier() else f"({mask})"
            return self.text(e, kind, inner)

    # -- loads and addresses ------------------------------------------------------------------------------------------
    def _load(self, e: Expr, block: Block) -> Value:
        access: Access = e.value
        base = self.inputs[access.operand]
        kind = vector_kind(e.dtype)
        place = self.place(e, block)
        if place is None:  # nothing to read: the operand is empty
            return Value(self.constant(expr.const(0, e.dtype), self.kind(e)), self.kind(e))
        offset, stride, gather = place
        masked = block.mask if self.pinned(e) else ""
        pointer = f"{base} + {offset}" if offset != "0" else base
        if access.operand >= len(self.nest.inputs) and self.wide:  # saved: VL lanes a point
            return Value(f"ld({base} + ({offset} * W + u) * VL, Full{{}})", kind)
        if self.varying(e):
            if gather:
                text = f"gather({base}, {gather}, {masked + ', ' if masked else ''}L)"
            elif masked:
                text = f"ld_masked({pointer}, {stride}, {masked}, L)"
            else:
                text = f"ld({pointer}, L)" if stride == 1 else f"ld_strided({pointer}, {stride}, L)"
            return Value(f"({text} != 0)" if kind == "mask" else text, kind)
        test = f"any({masked}) ? " if masked else ""
        if kind in ("vf", "vd"):
            text = f"ld_splat({pointer})"
            return Value(f"({test}{text} : {kind}{{}})" if masked else text, kind)
        scalar = uniform_kind(e.dtype)
        text = f"({scalar})ld1({pointer})"
        return Value(f"({test}{text} : 0)" if masked else text, scalar)

    def place(self, e: Expr, block: Block) -> tuple[str, int, str] | None:
        """(uniform offset, lane stride, per-lane offsets or '') of a load or store target; None if its operand is empty."""
        access: Access = e.value
        form = affine.affine(e.args[0])
        if self.lane is None:
            stride = 0
        else:
            stride = form.coefficient(self.lane)
        uniform = Affine({t: c for t, c in form.terms.items() if not self.varying(t)}, form.const)
        parts: list[str] = []
        scalar_parts: list[str] = []
        for t, c in form.terms.items():
            if self.varying(t) and t.op != "index":
                parts.append(f"{self.text(t, 'vi64', block)} * {c}")
        for idx, (n, step) in zip(e.args[1:], access.checks, strict=True):
            self.can_fail = True
            if n == 0:
                block.items.append("bad = 1;")
                return None
            mask = block.mask
            if self.varying(idx):
                text = f"checked({self.text(idx, 'vi64', block)}, {n}, bad, {mask + ', ' if mask else ''}L)"
                name = self.name()
                block.items.append(f"const vi64 {name} = {text};")
                parts.append(f"{name} * {step}")
            else:
                text = f"checked({self.text(idx, 'long', block)}, {n}, bad{f', any({mask})' if mask else ''})"
                name = self.name()
                home = self.home(e, block) if not self.varying(e) else self._index_home(e, idx, block)
                home.items.append(f"const long {name} = {text};")
                scalar_parts.append(f"{name} * {step}" if step != 1 else name)
        lane = self.lane
        offset = self.offset(uniform, block)
        if lane is not None and self.lane in self.deps(e) and stride:
            at = f"i{lane}" if stride == 1 else f"i{lane} * {stride}"
            offset = at if offset == "0" else f"{offset} + {at}"
        if scalar_parts:
            offset = " + ".join(scalar_parts) if offset == "0" else f"{' + '.join(scalar_parts)} + {offset}"
        if not parts:
            return offset, stride, ""
        vector = " + ".join(parts)
        if stride:
            vector += f" + iota<vi64>() * {stride}"
        return offset, stride, f"{vector} + ({offset})" if offset != "0" else vector

    def _index_home(self, e: Expr, idx: Expr, block: Block) -> Block:
        """Where a uniform checked index of a varying load is computed: hoisted, unless a branch protects it."""
        home = self.home(idx, block)
        branches = any(b.branch for b in block.chain())
        return block if branches else home

    def offset(self, form: Affine, block: Block) -> str:
        """The text of a uniform affine form; partial sums are named in the outermost block where they are known."""
        groups: dict[int, tuple[Block, list[tuple[Expr, int]]]] = {}
        for t, c in form.terms.items():
            home = self.home(t, block)
            groups.setdefault(sum(1 for _ in home.chain()), (home, []))[1].append((t, c))
        total, seen = "", frozenset[tuple[Expr, int]]()
        for depth in sorted(groups):
            home, terms = groups[depth]
            seen = seen | frozenset(terms)
            known = home.offsets.get(seen)
            if known is None:
                words = [total] if total else []
                for t, c in sorted(terms, key=lambda tc: (tc[0].op != "index", str(tc[0].value))):
                    text = self.text(t, "long", home)
                    words.append(text if c == 1 else f"{text} * {literal(c, 'long')[:-1] if c > 0 else literal(c, 'int')}")
                known = " + ".join(words)
                if not (known.isidentifier() and not known.startswith("(")):
                    name = self.name("o")
                    home.items.append(f"const long {name} = {known};")
                    known = name
                home.offsets[seen] = known
            total = known
        if form.const:
            total = f"{total} {'+' if form.const > 0 else '-'} {abs(form.const)}" if total else str(form.const)
        return total or "0"


def convert(value: Value, kind: str) -> str:
    """A value as another kind: splat, widened, or between masks and numbers."""
    text, have = value
    if have == kind:
        return text
    if kind in ("long", "int", "bool"):
        return f"({kind}){text}"
    if kind == "mask":
        return f"splat<vi32>(-(int){text})"
    if have == "mask":
        return f"({text} & 1)" if kind == "vi32" else f"cvt<{kind}>({text} & 1)"
    if have in ("long", "int", "bool"):
        return f"splat<{kind}>(({SCALAR_OF[kind]}){text})"
    return f"cvt<{kind}>({text})"


def _strip(text: str) -> str:
    """Without redundant outer parentheses."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for at, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and at < len(text) - 1:
            return text
    return text[1:-1]
