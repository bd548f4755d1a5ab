"""Scalar expressions as C++ on lane vectors. Each part is hoisted to the outermost loop that defines its operands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ...graph import affine, expr
from ...graph.affine import Affine
from ...graph.expr import Expr, is_behind_if_zero
from ...graph.scalar_ops import EXPENSIVE, SCALAR_OPS
from ...support import dtypes
from ..codegen.nest import Access, Nest
from ..codegen.rounding import rounded_clamp
from .blocks import CTYPE, SCALAR_OF, Block, Value, convert, literal, strip_parentheses, uniform_kind, vector_kind, wrap
from .dependences import Dependences

INLINE_LENGTH = 72  # longer texts get a name
FUNCTIONS = {"maximum": "max", "minimum": "min"}
CLAMPS = {"maximum": "at_least", "minimum": "at_most"}  # by a constant
# Ops whose results are exact in the type of the arguments and need no rounding.
EXACT = frozenset("maximum minimum and or xor shr sign".split())
_BOOL = {
    "add": "({0} | {1})", "or": "({0} | {1})", "maximum": "({0} | {1})", "and": "({0} & {1})", "mul": "({0} & {1})",
    "minimum": "({0} & {1})", "xor": "({0} ^ {1})", "ne": "({0} ^ {1})", "sub": "({0} ^ {1})", "eq": "{not}({0} ^ {1})",
    "lt": "({not}{0} & {1})", "gt": "({0} & {not}{1})", "le": "({not}{0} | {1})", "ge": "({0} | {not}{1})",
    "not": "{not}{0}",
}  # fmt: skip


class Place(NamedTuple):
    """The address of a load or store as C++ text: ``offset`` + lane * ``stride``, or the per-lane offsets ``gather``
    unless that is empty."""

    offset: str
    stride: int
    gather: str


class Renderer(Dependences):
    """Emits the expressions of one kernel.

    ``inputs``: names of the input pointers. ``lane``: the dim of the vector lanes; None: all values are uniform.
    ``across_rows``: the lanes are neighbouring rows. ``uses``: how often each expression is used.
    """

    def __init__(self, nest: Nest, inputs: list[str], lane: int | None, across_rows: bool, uses: Mapping[Expr, int]):
        super().__init__(nest, lane)
        self.inputs, self.across_rows, self.uses = inputs, across_rows, uses
        self.ranges = nest.ranges
        self.count = 0
        self.divides = False  # whether a divisor is checked, with the flag ``by_zero``

    def name(self, prefix: str = "t") -> str:
        """Return an unused C++ name."""
        self.count += 1
        return f"{prefix}{self.count}"

    def home(self, e: Expr, block: Block) -> Block:
        """Return the outermost block, from ``block`` outwards, where ``e`` can be computed."""
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
        """Return a name, literal or short text for ``e`` that is valid in ``block``."""
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
        """Define ``e`` as a constant in ``home`` and return its name."""
        home.values[e] = Value(self.define_text(made.text, made.kind, home), made.kind)
        return home.values[e]

    def define_text(self, text: str, kind: str, home: Block) -> str:
        """Define a constant in ``home`` from C++ text and return its name."""
        name = self.name()
        home.items.append(f"const {CTYPE.get(kind, kind)} {name} = {strip_parentheses(text)};")
        return name

    def text(self, e: Expr, kind: str, block: Block) -> str:
        """Return ``e`` converted to ``kind``: a vector kind, or a scalar type for a uniform value."""
        if e.op == "const":
            return self.constant(e, kind)
        return convert(self.value(e, block), kind)

    def constant(self, e: Expr, kind: str) -> str:
        """Return the literal of a constant expression in ``kind``."""
        if kind == "mask":
            return "(vi32{} - 1)" if e.value else "vi32{}"
        text = literal(expr.constant(e), kind)
        return f"splat<{kind}>({text})" if kind.startswith("v") else text

    def kind(self, e: Expr) -> str:
        """Return the kind in which ``e`` is computed; int32 needs half as many registers as int64."""
        if e in self.stages:
            return self.stages[e][1].kind
        if not self.varying(e):
            return uniform_kind(e.dtype)
        return "vi32" if e.dtype == "int64" and affine.fits_int32(e, self.ranges) else vector_kind(e.dtype)

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
        """Return the kind of a comparison's operands."""
        kinds = {self.kind(a) for a in e.args if a.op != "const"}
        for kind in ("vf", "vd", "vi64", "vi32", "long", "int"):
            if kind in kinds:
                if kind != "vi32" or "long" not in kinds or all(affine.fits_int32(a, self.ranges) for a in e.args):
                    return kind
                return "vi64"
        return uniform_kind(e.args[0].dtype)

    def _compare(self, e: Expr, block: Block) -> Value:
        kind = self._operand_kind(e)
        if kind in ("vd", "vi64") and self.varying(e):  # vectors of two registers
            a, b = (self.text(x, kind, block) for x in (e.args[0], e.args[-1]))
            if e.op == "isinf":
                return Value(f"compare<Eq>(abs({a}), splat<{kind}>({literal(math.inf, kind)}))", "mask")
            return Value(f"compare<{'Ne' if e.op == 'isnan' else e.op.capitalize()}>({a}, {b})", "mask")
        if e.op == "isnan":
            a = self.text(e.args[0], kind, block)
            parts = f"{a} != {a}"
        elif e.op == "isinf":
            parts = f"abs({self.text(e.args[0], kind, block)}) == {literal(math.inf, kind)}"
        else:
            a, b = (self._infix_operand(x, kind, block, e) for x in e.args)
            parts = f"{a} {SCALAR_OPS[e.op].infix} {b}"
        if not self.varying(e):
            return Value(f"(({parts})[0] != 0)" if kind in ("vf", "vd") else f"({parts})", "bool")
        return Value(f"({parts})", "mask")

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
            return f"({a} {SCALAR_OPS[op].infix} {b})"
        args = [self.text(a, kind, block) for a in e.args]
        if kind in ("vf", "vd") and op in CLAMPS and e.args[1].op == "const" and not math.isnan(e.args[1].value):
            return f"{CLAMPS[op]}({', '.join(args)})"
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
        if dtypes.is_narrow(dtype):
            return f"round_to<{dtypes.DTYPES[dtype].ctype}>({text})"
        return wrap(text, dtype)

    def _cast(self, e: Expr, block: Block) -> Value:
        source, target = e.args[0], e.dtype
        kind = self.kind(e)
        if kind == "vi32" and (found := rounded_clamp(source)) is not None and self.varying(e):
            x, offset, low, high = found
            clamped = f"round_clamped({self.text(x, 'vf', block)}, {offset}, {low}, {high})"
            bits = 8 * dtypes.DTYPES[target].size
            least = -(1 << bits - 1) if dtypes.DTYPES[target].kind == "int" else 0
            return Value(clamped if least <= low <= high < least + (1 << bits) else wrap(clamped, target), kind)
        value = self.value(source, block)
        if source.op == "const":
            value = Value(self.constant(source, self.kind(source)), self.kind(source))
        if target == "bool":
            zero = f"{value.text} != 0"
            if value.kind in ("mask", "bool"):
                return value
            if not self.varying(e):
                return Value(f"(({zero})[0] != 0)" if value.kind in ("vf", "vd") else f"({zero})", "bool")
            wide = value.kind in ("vd", "vi64")
            return Value(f"compare<Ne>({value.text}, {value.kind}{{}})" if wide else f"({zero})", "mask")
        if value.kind in ("vf", "vd") and not self.varying(e) and not dtypes.is_float(target):
            return Value(wrap(f"({'long' if kind == 'long' else 'int'}){value.text}[0]", target), kind)
        if value.kind == "vf" and kind == "vf" and not (dtypes.is_narrow(target) and source.dtype != target):
            return value
        text = convert(value, kind)
        if dtypes.is_float(target):
            return Value(self._round(text, target) if dtypes.is_narrow(target) else text, kind)
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
            test = strip_parentheses(test)
        for arm, header in zip(arms, (f"if ({test}) {{", "else {"), strict=True):
            with block.child(header, kind="branch") as inner:
                inner.mask = block.mask
                inner.items.append(f"{name} = {strip_parentheses(self.text(arm, kind, inner))};")
        return Value(name, kind)

    def _worth_branching(self, e: Expr, block: Block) -> bool:
        """Whether a branch would skip an expensive computation of an arm in this block."""
        loop = next(b for b in block.chain() if not b.branch)
        for x in expr.walk(e):
            heavy = (x.op == "load" or x.op in EXPENSIVE) and not any(x in b.values for b in block.chain())
            if heavy and self.home(x, loop) is loop:
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
        if place is None:  # the operand is empty
            return Value(self.constant(expr.const(0, e.dtype), self.kind(e)), self.kind(e))
        offset, stride, gather = place
        masked = block.mask if self.pinned(e) else ""
        pointer = f"{base} + {offset}" if offset != "0" else base
        if access.operand >= len(self.nest.inputs) and self.across_rows:  # saved: VL lanes a point
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

    def place(self, e: Expr, block: Block) -> Place | None:
        """Return the address of a load or store; None if its operand is empty (``bad`` is set instead)."""
        form = affine.affine(e.args[0])
        lanes = self._offset_kind(e.value.operand)
        vectors = [f"{self.text(t, lanes, block)} * {form.terms[t]}" for t in form.opaque() if self.varying(t)]
        scalars: list[str] = []
        for idx, (n, step) in zip(e.args[1:], e.value.checks, strict=True):
            if n == 0:
                block.items.append("bad = 1;")
                return None
            at = self._checked(idx, n, lanes, block) + (f" * {step}" if step != 1 else "")
            (vectors if self.varying(idx) else scalars).append(at)
        stride = 0
        if self.lane is not None and self.lane in self.deps(e) and (stride := form.coefficient(self.lane)):
            scalars.append(f"i{self.lane}" if stride == 1 else f"i{self.lane} * {stride}")
        uniform = self.offset(Affine({t: c for t, c in form.terms.items() if not self.varying(t)}, form.const), block)
        scalars = [uniform, *scalars] if uniform != "0" else scalars
        offset = " + ".join(scalars) or "0"
        if not vectors:
            return Place(offset, stride, "")
        if stride:
            vectors.append(f"iota<{lanes}>() * {stride}")
        uniform = f"({SCALAR_OF[lanes]})({offset})"
        return Place(offset, stride, " + ".join([*vectors, uniform] if scalars else vectors))

    def _offset_kind(self, operand: int) -> str:
        """Return the vector kind of offsets in an operand: int32 unless it has too many elements. Sums may wrap around
        before the last term, because the result fits."""
        if operand >= len(self.nest.inputs):  # saved temporaries of one row
            return "vi32"
        op = self.nest.outputs[~operand] if operand < 0 else self.nest.inputs[operand]
        extent = sum(abs(step) * (n - 1) for n, step in zip(op.shape, op.strides, strict=True))
        return "vi32" if extent < 2**31 else "vi64"

    def _index(self, idx: Expr, block: Block) -> Value:
        """Return a data-dependent index whose range is to be checked, in 32 bits if these have it or are out of range
        whenever it is."""
        if idx.op == "cast" and self.varying(idx) and vector_kind(idx.args[0].dtype) in ("vf", "vi32"):
            return Value(convert(self.value(idx.args[0], block), "vi32"), "vi32")
        kind = self.kind(idx) if self.varying(idx) else "long"
        return Value(self.text(idx, kind, block), kind)

    def _checked(self, idx: Expr, n: int, lanes: str, block: Block) -> str:
        """Emit the range check of a data-dependent index and return the checked name, of kind ``lanes`` if the index
        varies."""
        if self.varying(idx):
            name, kind, home = self.name(), lanes, block
            extra = f", {block.mask}, L" if block.mask else ", L"
        else:
            name, kind = self.name(), "long"
            home = block if any(b.branch for b in block.chain()) else self.home(idx, block)
            extra = f", any({block.mask})" if block.mask else ""
        text, have = self._index(idx, home)
        divides = is_behind_if_zero(idx)
        self.divides |= divides
        flag = "by_zero" if divides else "bad"
        checked = convert(Value(f"checked({text}, {n}, {flag}{extra})", have), kind)
        home.items.append(f"const {kind} {name} = {checked};")
        return name

    def offset(self, form: Affine, block: Block) -> str:
        """Return the text of a uniform affine form; partial sums are defined in the outermost block where possible."""
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
                    words.append(text if c == 1 else f"{text} * {c}" if c > 0 else f"{text} * ({c})")
                known = " + ".join(words)
                if not known.isidentifier():
                    name = self.name("o")
                    home.items.append(f"const long {name} = {known};")
                    known = name
                home.offsets[seen] = known
            total = known
        if form.const:
            total = f"{total} {'+' if form.const > 0 else '-'} {abs(form.const)}" if total else str(form.const)
        return total or "0"
