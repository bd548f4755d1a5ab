"""Attention of many queries on the matrix unit: scores never leave the registers.

A group takes 64 query rows of one head, a simd 16 of them; keys and values come in tiles of 64 through group memory,
the next while this one is used. Tiles beyond the last key that some row sees are skipped.

Sources: Dao, "FlashAttention-2" (2023), https://arxiv.org/abs/2307.08691; Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018).
"""

from __future__ import annotations

import math

from ... import dtypes
from ...kernel import Kernel, Operand
from .dialect import Dialect
from .emission import Emission
from .function import Function, blocks
from .scalar import literal, read

LEAST_QUERIES = 16


def is_flash(kernel: Kernel, dialect: Dialect) -> bool:
    """Whether the matrix unit takes it: half types, dense rows at multiples of 16 bytes, head sizes up to 128."""
    q, k, v = kernel.inputs[:3]
    d, dv = q.shape[3], v.shape[3]
    dense = all(o.strides[3] == 1 and not any(s % 8 for s in (*o.strides[:3], o.offset)) for o in (q, k, v))
    out = kernel.outputs[0]
    fits = d == dv and d % 16 == 0 and d <= 128 and out.strides[3] == 1 and not any(s % 2 for s in out.strides[:3])
    return dialect.flash and q.dtype in dialect.matrix_types and q.shape[2] >= LEAST_QUERIES and dense and fits


def emit_flash(kernel: Kernel, dialect: Dialect) -> Emission:
    """The function of an ``attention`` kernel for which :func:`is_flash`."""
    return Flash(kernel, dialect).emit()


class Flash:
    """``rows`` of queries a group, ``keys`` a tile, ``threads`` that know the range of keys."""

    rows, keys, threads = 64, 64, 128

    def __init__(self, kernel: Kernel, dialect: Dialect):
        self.kernel, self.f = kernel, Function(kernel, dialect, early=True)
        q, k = kernel.inputs[:2]
        self.b, self.h, self.sq, self.d = q.shape
        self.share, self.sk = self.h // k.shape[1], k.shape[2]
        self.ld = self.d + 8
        self.ctype, self.dtype = dtypes.DTYPES[q.dtype].ctype, q.dtype
        self.by_position = bool(kernel.attrs.get("by_position"))  # keys up to a query's own position
        mask = kernel.inputs[3] if len(kernel.inputs) > 3 and not self.by_position else None
        self.mask = mask
        # a mask of bytes travels with the keys
        self.tiled = mask is not None and mask.dtype == "bool" and mask.strides[3] == 1
        self.tiled = self.tiled and mask is not None and not any(s % 16 for s in (*mask.strides[:3], mask.offset))

    def emit(self) -> Emission:
        f, out = self.f, self.f.lines
        tiles = blocks(self.sq, self.rows)
        out.add(f"const int tile = {tiles - 1} - gid % {tiles};  // those with the most keys first")
        out.add(f"const int h = gid / {tiles} % {self.h}, b = gid / {tiles * self.h}, hk = h / {self.share};")
        out.add("(void)b; (void)hk;", f"const int q0 = tile * {self.rows};")
        size = self.keys * self.ld
        f.array(self.ctype, "ks", 2 * size)
        f.array(self.ctype, "vs", 2 * size)
        if self.tiled:
            f.array("int", "ms", 2 * self.rows * self.keys // 4)
        self._range()
        self._rows("ks", 0, "q0", self.sq, "h", f"{self.rows}")  # the queries pass through the first tile of keys
        out.add("copy_commit();", "copy_wait<0>();", "barrier();", f"FragA<{self.ctype}> q[{self.d // 16}];")
        out.add("#pragma unroll", f"for (int k = 0; k < {self.d // 16}; k++)")
        out.add(f"  frag_load_a(q[k], ks + sid * {16 * self.ld} + k * 16, {self.ld}, lane);", "barrier();")
        out.add(f"FragC o[{self.d // 8}];", "#pragma unroll")
        out.add(f"for (int n = 0; n < {self.d // 8}; n++) frag_zero(o[n]);")
        out.add("float top[2] = {-m_inf_float(), -m_inf_float()}, sum[2] = {0.0f, 0.0f};")
        self._row_limits()
        out.add(f"const int steps = (valid + {self.keys - 1}) / {self.keys};")
        with out.block("if (steps > 0) {"):
            self._load("0", "0")
        out.add("copy_commit();")
        with out.block("for (int step = 0; step < steps; step++) {"):
            out.add("copy_wait<0>();", "barrier();")
            with out.block("if (step + 1 < steps) {"):
                self._load("(step + 1)", "((step + 1) & 1)")
            out.add("copy_commit();")
            self._scores()
            self._softmax()
            self._values()
        self._store()
        return f.finish(tiles * self.h * self.b, self.threads)

    def _range(self) -> None:
        """How many keys the group sees; what the caller gives is read before the kernel waits for others."""
        given = self.kernel.attrs["limited"] and self._limits().buffer.given
        if not given:
            self.f.lines.add("wait_inputs();")
        self._count_keys()
        if given:
            self.f.lines.add("wait_inputs();")

    def _limits(self) -> Operand:
        return self.kernel.inputs[3 if self.by_position else 4]

    def _count_keys(self) -> None:
        out, a = self.f.lines, self.kernel.attrs
        out.add(f"int valid = {self.sk};")
        if a["limited"]:
            p = self._limits()
            simds = self.threads // 32
            self.f.array("int", "limit", 2 * simds)
            out.add(f"int last = -1, least = {self.sk};")
            with out.block(f"for (int i = q0 + tid; i < q0 + {self.rows} && i < {self.sq}; i += {self.threads}) {{"):
                out.add(f"const int64_t at = {self.f.pointer(self.kernel.inputs.index(p))}[i * {p.strides[0]}];")
                out.add(f"last = at > last ? (int)(at < {self.sk} ? at : {self.sk - 1}) : last;")
                out.add("least = at < least ? (int)at : least;")
            out.add("#pragma unroll")
            with out.block("for (int m = 16; m > 0; m >>= 1) {"):
                out.add("const int a = simd_xor(last, m), b = simd_xor(least, m);")
                out.add("last = a > last ? a : last;", "least = b < least ? b : least;")
            out.add(
                f"if (lane == 0) {{ limit[sid] = last; limit[{simds} + sid] = least; }}", "barrier();", "valid = 0;"
            )
            out.add("#pragma unroll")
            with out.block(f"for (int s = 0; s < {simds}; s++) {{"):
                out.add("valid = limit[s] + 1 > valid ? limit[s] + 1 : valid;")
                out.add(f"least = limit[{simds} + s] < least ? limit[{simds} + s] : least;")
        if a["causal"]:
            out.add(f"valid = q0 + {self.rows} < valid ? q0 + {self.rows} : valid;")

    def _rows(self, array: str, number: int, first: str, count: int, head: str, limit: str) -> None:
        """Copies of 64 rows of operand ``number``, from row ``first`` on."""
        op, out = self.kernel.inputs[number], self.f.lines
        pieces = self.d // 8
        out.add("#pragma unroll")
        with out.block(f"for (int c = tid; c < {self.rows * pieces}; c += {self.threads}) {{"):
            out.add(f"const int r = c / {pieces}, d = c % {pieces} * 8, i = {first} + r; const bool ok = i < {count};")
            place = self._place(Operand(op.buffer, op.shape[:3], op.strides[:3]), "b", head, "(ok ? i : 0)")
            out.add(f"copy16({array} + r * {self.ld} + d, {self.f.pointer(number)} + {place} + d, ok);")

    def _place(self, op: Operand, *indices: str) -> str:
        words = [f"(int64_t){i} * {s}" for i, s in zip(indices, op.strides, strict=True) if s]
        return " + ".join(words) or "0"

    def _load(self, step: str, slot: str) -> None:
        size = self.keys * self.ld
        for array, number in (("ks", 1), ("vs", 2)):
            self._rows(f"{array} + {slot} * {size}", number, f"{step} * {self.keys}", self.sk, "hk", "")
        if self.tiled:
            mask, out = self.mask, self.f.lines
            assert mask is not None
            pieces = self.keys // 16
            with out.block(f"for (int c = tid; c < {self.rows * pieces}; c += {self.threads}) {{"):
                out.add(f"const int r = c / {pieces}, t = {step} * {self.keys} + c % {pieces} * 16;")
                out.add(f"const bool ok = q0 + r < {self.sq} && t < {self.sk - self.sk % 16};")
                base = Operand(mask.buffer, mask.shape[:3], mask.strides[:3])
                place = self._place(base, "b", "h", "(q0 + r)")
                at = f"(GROUP bool8*)ms + {slot} * {self.rows * self.keys} + r * {self.keys} + c % {pieces} * 16"
                out.add(f"copy16({at}, {self.f.pointer(3)} + (ok ? {place} + t : 0), ok);")

    def _scores(self) -> None:
        out = self.f.lines
        out.add(f"GROUP const {self.ctype}* const keys = ks + (step & 1) * {self.keys * self.ld};")
        out.add(
            f"FragC s[{self.keys // 8}];",
            "#pragma unroll",
            f"for (int j = 0; j < {self.keys // 8}; j++) frag_zero(s[j]);",
        )
        out.add("#pragma unroll")
        with out.block(f"for (int k = 0; k < {self.d // 16}; k++) {{"):
            out.add("#pragma unroll")
            with out.block(f"for (int j = 0; j < {self.keys // 8}; j += 2) {{"):
                out.add(f"FragB<{self.ctype}> x, y;")
                out.add(f"frag_load_b2(x, y, keys + j * {8 * self.ld} + k * 16, {self.ld}, lane);")
                out.add("frag_mma(s[j], q[k], x);", "frag_mma(s[j + 1], q[k], y);")

    def _softmax(self) -> None:
        """Scores to weights, in place; ``o`` and ``sum`` are scaled to the new maximum. Exponents are of two. Scores
        are scaled when they become exponents, in one instruction, unless a mask is added to them."""
        out, scale = self.f.lines, self.kernel.attrs["scale"] * math.log2(math.e)
        times = f" * {literal(scale, 'float')}"
        added = self.mask is not None and self.mask.dtype != "bool"
        now, later = (times, "") if added or scale < 0 else ("", times)
        out.add("#pragma unroll")
        with out.block("for (int r = 0; r < 2; r++) {"):
            out.add("const int i = q0 + sid * 16 + frag_row(lane, 2 * r); (void)i;", "float most = top[r];")
            with out.block(f"if ({self._partly()}) {{"):
                out.add("#pragma unroll")
                with out.block(f"for (int j = 0; j < {self.keys // 8}; j++) {{"):
                    out.add("#pragma unroll")
                    with out.block("for (int e = 2 * r; e < 2 * r + 2; e++) {"):
                        out.add(f"const int c = j * 8 + frag_column(lane, e), t = step * {self.keys} + c; (void)t;")
                        out.add(f"float x = s[j].v[e]{now};")
                        out.add(f"x = {self._visible()} ? x : -m_inf_float();")
                        out.add("s[j].v[e] = x;", "most = m_max(most, x);")
            with out.block("else {"):
                out.add("#pragma unroll")
                with out.block(f"for (int j = 0; j < {self.keys // 8}; j++) {{"):
                    out.add("#pragma unroll", "for (int e = 2 * r; e < 2 * r + 2; e++)")
                    out.add(f"  most = m_max(most, {f's[j].v[e] = s[j].v[e]{now}' if now else 's[j].v[e]'});")
            out.add("most = frag_row_max(most);")
            out.add(f"const float base = most == -m_inf_float() ? 0.0f : most{later};")
            out.add(f"const float keep = m_exp2(top[r]{later} - base);")
            out.add("float more = 0.0f;", "#pragma unroll")
            with out.block(f"for (int j = 0; j < {self.keys // 8}; j++) {{"):
                out.add("#pragma unroll")
                out.add("for (int e = 2 * r; e < 2 * r + 2; e++)")
                out.add(f"  more += s[j].v[e] = m_exp2_fast(s[j].v[e]{later} - base);")
            out.add("top[r] = most;", "sum[r] = sum[r] * keep + more;", "#pragma unroll")
            out.add(f"for (int n = 0; n < {self.d // 8}; n++) {{ o[n].v[2 * r] *= keep; o[n].v[2 * r + 1] *= keep; }}")

    def _partly(self) -> str:
        """Whether some row of the group may not see some key of the tile."""
        end = f"(step + 1) * {self.keys}"
        if self.mask is not None:
            return "true"
        if self.by_position:
            return f"{end} > least + 1"
        return f"{end} > valid || {end} > q0 + 1" if self.kernel.attrs["causal"] else f"{end} > valid"

    def _row_limits(self) -> None:
        """``mine``: the last key that each of a lane's two rows sees."""
        if self.by_position:
            out = self.f.lines
            out.add("int mine[2];", "#pragma unroll")
            with out.block("for (int r = 0; r < 2; r++) {"):
                out.add("const int i = q0 + sid * 16 + frag_row(lane, 2 * r);")
                place = f"(i < {self.sq} ? i : {self.sq - 1}) * {self.kernel.inputs[3].strides[0]}"
                out.add(f"const int64_t at = {self.f.pointer(3)}[{place}];")
                out.add(f"mine[r] = at < 0 ? -1 : at < {self.sk} ? (int)at : {self.sk - 1};")

    def _visible(self) -> str:
        """The condition under which row ``i`` sees key ``t``; other masks add to the score ``x``."""
        conditions = ["t < valid"]
        if self.kernel.attrs["causal"]:
            conditions.append("t <= i")
        if self.by_position:
            conditions.append("t <= mine[r]")
        mask = self.mask
        if mask is None:
            return " && ".join(conditions)
        clamped = f"(i < {self.sq} ? i : {self.sq - 1})"
        text = read(self.f.pointer(3), self._place(mask, "b", "h", clamped, "(t < valid ? t : 0)"), mask.dtype).text
        if mask.dtype != "bool":
            self.f.lines.add(f"x += (float){text} * {literal(math.log2(math.e), 'float')};")
        elif self.tiled:
            place = f"(step & 1) * {self.rows * self.keys} + (i - q0) * {self.keys} + c"
            inside = f"((GROUP const bool8*)ms)[{place}] != 0"
            tail = self.sk - self.sk % 16
            conditions.append(inside if tail == self.sk else f"(t < {tail} ? {inside} : {text})")
        else:
            conditions.append(text)
        return " && ".join(conditions)

    def _values(self) -> None:
        out = self.f.lines
        out.add(f"GROUP const {self.ctype}* const values = vs + (step & 1) * {self.keys * self.ld};", "#pragma unroll")
        with out.block(f"for (int k = 0; k < {self.keys // 16}; k++) {{"):
            out.add(f"FragA<{self.ctype}> w;", "frag_from_results(w, s[2 * k], s[2 * k + 1]);", "#pragma unroll")
            with out.block(f"for (int n = 0; n < {self.d // 8}; n += 2) {{"):
                out.add(f"FragB<{self.ctype}> x, y;")
                out.add(f"frag_load_turned(x, y, values + k * {16 * self.ld} + n * 8, {self.ld}, lane);")
                out.add("frag_mma(o[n], w, x);", "frag_mma(o[n + 1], w, y);")

    def _store(self) -> None:
        out, o = self.f.lines, self.kernel.outputs[0]
        out.add("#pragma unroll")
        with out.block("for (int r = 0; r < 2; r++) {"):
            out.add("const int i = q0 + sid * 16 + frag_row(lane, 2 * r);", "const float total = frag_row_sum(sum[r]);")
            out.add("const float scale = total > 0.0f ? 1.0f / total : 0.0f;", f"if (i >= {self.sq}) continue;")
            base = Operand(o.buffer, o.shape[:3], o.strides[:3])
            out.add(f"DEVICE {self.ctype}* const to = {self.f.pointer(~0)} + {self._place(base, 'b', 'h', 'i')};")
            out.add("#pragma unroll")
            with out.block(f"for (int n = 0; n < {self.d // 8}; n++) {{"):
                values = ", ".join(f"to_{self.ctype}(o[n].v[2 * r + {e}] * scale)" for e in range(2))
                out.add(f"const Vec<{self.ctype}, 2> pair = {{{{{values}}}}};")
                out.add(f"*(DEVICE Vec<{self.ctype}, 2>*)(to + n * 8 + frag_column(lane, 2 * r)) = pair;")
