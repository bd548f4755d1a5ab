"""C++ of the stores of generated loop nests: single elements, vectors, and 16-bit floats that only move."""

from __future__ import annotations

from collections.abc import Callable

from ...graph import affine, expr
from ...graph.expr import Expr, const
from ..codegen.nest import Nest, Step
from ..codegen.rounding import is_bfloat16, unrounded
from .blocks import Block, uniform_kind, vector_kind
from .plan import Plan
from .render import Renderer


class Stores:
    """Emits the stores of a nest. ``known`` simplifies an expression by what is known at the point of the store."""

    def __init__(self, nest: Nest, plan: Plan, render: Renderer, known: Callable[[Expr], Expr]):
        self.nest, self.plan, self.render, self.known = nest, plan, render, known

    def value(self, s: Step) -> Expr:
        """Return the value that a store writes."""
        return unrounded(self.known(s.value.cast(self.nest.outputs[s.output].dtype)))

    def emit(self, body: Block, stores: list[Step], before: list[str] | None = None) -> None:
        """Emit one vector of points of each of ``stores``, all behind the statements ``before``."""
        lines = before or []
        for s in stores:
            lines += self._store(body, s)
        body.items += lines

    def _store(self, body: Block, s: Step) -> list[str]:
        render, plan = self.render, self.plan
        assert s.target is not None
        out, dtype = f"b{s.output}", self.nest.outputs[s.output].dtype
        e, target = self.value(s), self.known(s.target)
        if plan.interleaved is not None:
            return self._interleaved(body, e, target, out, plan.interleaved)
        if plan.lane is None or (not plan.across_rows and s.per_row):
            text = render.text(e, uniform_kind(dtype), body)
            place = render.place(target, body)
            text = f"({text})[0]" if vector_kind(dtype) in ("vf", "vd") else text
            return [f"st1({out} + {place.offset}, {text});"] if place else []
        if self._moves(e, target, dtype):
            source, place = render.place(e, body), render.place(target, body)
            if source is None or place is None:
                return []
            moved = f"{render.inputs[e.value.operand]} + {source.offset}"
            return [f"move({out} + {place.offset}, {moved}, L);"]
        text = self._named(e, body)
        place = render.place(target, body)
        if place is None:
            return []
        if place.gather:
            return [f"scatter({out}, {place.gather}, {text}, L);"]
        if place.stride == 1 and dtype == "bfloat16" and is_bfloat16(e):
            return [f"st_exact({out} + {place.offset}, {text}, L);"]
        if place.stride == 1:
            return [f"st({out} + {place.offset}, {text}, L);"]
        return [f"st_strided({out} + {place.offset}, {place.stride}, {text}, L);"]

    def _moves(self, e: Expr, target: Expr, dtype: str) -> bool:
        """Whether a store moves 16-bit floats as they are from neighbours to neighbours: it needs no float32."""
        if dtype not in ("bfloat16", "float16") or e.op != "load" or e.value.guarded or self.plan.tiled:
            return False
        read = 0 <= e.value.operand < len(self.nest.inputs) and self.nest.inputs[e.value.operand].dtype == dtype
        return read and self.beside(e) and self.beside(target)

    def beside(self, x: Expr) -> bool:
        """Whether the lanes of a load or store are neighbours in memory."""
        form, lane = affine.affine(x.args[0]), self.plan.lane
        if lane is None or form.coefficient(lane) != 1:
            return False
        return not any(map(self.render.varying, (*form.opaque(), *x.args[1:])))

    def _interleaved(self, body: Block, e: Expr, target: Expr, out: str, dim: int) -> list[str]:
        """Emit the interleaved vectors of all positions of a short innermost dim."""
        parts = [expr.substitute(e, {dim: const(m, "int64")}) for m in range(self.nest.size[dim])]
        vectors = [self._named(self.known(part), body) for part in parts]
        place = self.render.place(expr.substitute(target, {dim: const(0, "int64")}), body)
        assert place is not None
        return [f"st_interleaved({out} + {place.offset}, L, {', '.join(vectors)});"]

    def _named(self, e: Expr, body: Block) -> str:
        kind = vector_kind(e.dtype)
        text = self.render.text(e, kind, body)
        if text.isidentifier():
            return text
        return self.render.define_text(text, kind, body)
