"""Attention on float arithmetic, for any mask and any strides: query rows that share keys are taken together.

A group takes up to 8 query rows of one key/value head (the heads of a GQA group side by side) and a range of the keys,
in steps of :data:`CHUNK`: scores, running maximum, weighted values. Keys beyond the valid length are never read. When
the range is only a part of the keys (attrs ``splits``), (maximum, sum, values) go to memory and ``attention_merge``
combines them in order. Source: Dao, "FlashAttention-2" (2023), https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

from ... import dtypes
from ...kernel import Kernel, Operand
from .dialect import SIMD, Dialect
from .emission import Emission
from .flash import emit_flash, is_flash
from .function import Function, blocks
from .scalar import literal, read, storage

THREADS = 256
CHUNK = 256  # keys a step
MOST_ROWS = 8
MERGE_TEAMS = 4  # that share the parts of one result
MEET_BYTES = 24 << 10


def emit_attention(kernel: Kernel, dialect: Dialect) -> Emission:
    """The function of an ``attention`` kernel; outputs: the result, or with ``splits`` S the float32 parts
    [S, B, H, SQ, D + 2] (values, maximum, sum)."""
    if is_flash(kernel, dialect):
        return emit_flash(kernel, dialect)
    return _Attention(kernel, dialect).emit()


class _Attention:
    def __init__(self, kernel: Kernel, dialect: Dialect):
        self.kernel, self.f = kernel, Function(kernel, dialect)
        q, k, v = kernel.inputs[:3]
        self.b, self.h, self.sq, self.d = q.shape
        self.hk, self.sk, self.dv = k.shape[1], k.shape[2], v.shape[3]
        self.share = self.h // self.hk  # query heads of one key/value head
        self.splits = kernel.attrs.get("splits", 1)
        self.queries = self.share * self.sq
        self.by_position = bool(kernel.attrs.get("by_position"))  # keys up to a query's own position
        self.rows = min(MOST_ROWS, self.queries)
        # a row of keys or values is shared by a team of lanes, `item` elements each
        self.item = 8
        self.team = 1
        while self.team * self.item < max(self.d, self.dv):
            self.team *= 2
        if self.team > SIMD:
            self.team, self.item = SIMD, blocks(max(self.d, self.dv), SIMD * 4) * 4

    def emit(self) -> Emission:
        f, out = self.f, self.f.lines
        tiles = blocks(self.queries, self.rows)
        out.add(f"const int tile = gid % {tiles}, split = gid / {tiles} % {self.splits}; (void)split;")
        out.add(f"const int hk = gid / {tiles * self.splits} % {self.hk}, b = gid / {tiles * self.splits * self.hk};")
        out.add(f"const int team = tid / {self.team}, member = tid % {self.team}, d0 = member * {self.item};")
        self._range()
        self._queries()
        chunk = min(CHUNK, blocks(self.sk, SIMD) * SIMD)
        teams = THREADS // self.team
        f.array("float", "score", self.rows * chunk)
        f.array("float", "top", self.rows)
        f.array("float", "total", self.rows)
        f.array("float", "scale", self.rows)
        out.add(f"float acc[{self.rows}][{self.item}] = {{}};")
        out.add(f"if (tid < {self.rows}) {{ top[tid] = -m_inf_float(); total[tid] = 0.0f; }}")
        with out.block(f"for (int start = begin; start < end; start += {chunk}) {{"):
            out.add(f"const int count = end - start < {chunk} ? end - start : {chunk};")
            out.add(f"const int padded = (count + {SIMD - 1}) / {SIMD} * {SIMD};  // whole simds", "barrier();")
            out.add("#pragma unroll 2")
            with out.block(f"for (int j = team; j < padded; j += {teams}) {{"):
                self._scores(chunk)
            out.add("barrier();")
            self._softmax(chunk)
            out.add("barrier();", "#pragma unroll")
            out.add(f"for (int r = 0; r < {self.rows}; r++)", "#pragma unroll")
            out.add(f"  for (int e = 0; e < {self.item}; e++) acc[r][e] *= scale[r];")
            out.add("#pragma unroll 4")
            with out.block(f"for (int j = team; j < count; j += {teams}) {{"):
                self._values(chunk)
        self._finish(teams)
        return f.finish(tiles * self.splits * self.hk * self.b, THREADS)

    def _range(self) -> None:
        """``begin`` and ``end`` of the keys of this group: all that some query sees, or this split's share of them."""
        out, a = self.f.lines, self.kernel.attrs
        out.add(f"int valid = {self.sk};")
        if a["limited"]:
            out.add("valid = 0;")
            with out.block(f"for (int i = 0; i < {self.sq}; i++) {{"):
                number = 3 if self.by_position else 4
                p = self.kernel.inputs[number]
                out.add(f"const int64_t last = {self.f.pointer(number)}[i * {p.strides[0]}] + 1;")
                out.add("valid = last > valid ? (int)last : valid;")
            out.add(f"valid = valid < {self.sk} ? valid : {self.sk};")
        if a["causal"]:
            last = f"tile * {self.rows} + {self.rows - 1}" if self.share == 1 else f"{self.sq - 1}"
            out.add(f"valid = {last} + 1 < valid ? {last} + 1 : valid;" if self.share == 1 else "")
        if self.splits == 1:
            out.add("const int begin = 0, end = valid;")
            return
        out.add(f"const int share = (valid + {self.splits * SIMD - 1}) / {self.splits * SIMD} * {SIMD};")
        out.add("const int begin = split * share;")
        out.add("const int end = begin + share < valid ? begin + share : valid;")

    def _row(self, r: str) -> str:
        """Statements that make ``h`` and ``i``, head and position of query row ``r``, and whether it ``exists``."""
        return (
            f"const int row = tile * {self.rows} + {r}; const bool exists = row < {self.queries};"
            f" const int h = hk * {self.share} + (exists ? row / {self.sq} : 0), i = exists ? row % {self.sq} : 0;"
            " (void)h; (void)i;"
        )

    def _place(self, op: Operand, *indices: str) -> str:
        words = [f"(int64_t){i} * {s}" for i, s in zip(indices, op.strides, strict=True) if s]
        return " + ".join(words) or "0"

    def _queries(self) -> None:
        out, q = self.f.lines, self.kernel.inputs[0]
        out.add(f"float q[{self.rows}][{self.item}];", "#pragma unroll")
        with out.block(f"for (int r = 0; r < {self.rows}; r++) {{"):
            out.add(self._row("r"))
            out.add("#pragma unroll", f"for (int e = 0; e < {self.item}; e++)")
            at = self._place(q, "b", "h", "i", "(d0 + e)")
            value = read(self.f.pointer(0), at, q.dtype).text
            factor = literal(self.kernel.attrs["scale"], "float")
            out.add(f"  q[r][e] = exists && d0 + e < {self.d} ? {value} * {factor} : 0.0f;")

    def _vector(self, number: int, name: str, dim: int, at: str) -> None:
        """``name[item]``: this lane's part of a row of keys or values."""
        op, out = self.kernel.inputs[number], self.f.lines
        size, pointer = dtypes.DTYPES[op.dtype].size, self.f.pointer(number)
        ctype = dtypes.DTYPES[op.dtype].ctype
        piece = 16 // size
        aligned = op.strides[-1] == 1 and not any(n * size % 16 for n in (dim, op.offset, *op.strides[:-1]))
        out.add(f"float {name}[{self.item}];")
        if aligned and self.item % piece == 0:
            out.add("#pragma unroll")
            with out.block(f"for (int e = 0; e < {self.item}; e += {piece}) {{"):
                load = f"load16({pointer} + {at} + d0 + e)"
                out.add(f"if (d0 + e < {dim}) unpack({load}, {name} + e, (THREAD {ctype}*)nullptr);")
                out.add(f"else for (int n = 0; n < {piece}; n++) {name}[e + n] = 0.0f;")
            return
        value = read(pointer, f"{at} + (int64_t)(d0 + e) * {op.strides[-1]}", op.dtype).text
        out.add(f"for (int e = 0; e < {self.item}; e++) {name}[e] = d0 + e < {dim} ? {value} : 0.0f;")

    def _scores(self, chunk: int) -> None:
        out, k, kernel = self.f.lines, self.kernel.inputs[1], self.kernel
        out.add("const int t = start + (j < count ? j : count - 1);")
        base = Operand(k.buffer, k.shape[:3], k.strides[:3])
        self._vector(1, "key", self.d, self._place(base, "b", "hk", "t"))
        out.add(f"float s[{self.rows}];", "#pragma unroll")
        with out.block(f"for (int r = 0; r < {self.rows}; r++) {{"):
            out.add(
                "s[r] = 0.0f;", "#pragma unroll", f"for (int e = 0; e < {self.item}; e++) s[r] += q[r][e] * key[e];"
            )
            if self.team > 1:
                out.add("#pragma unroll", f"for (int m = {self.team // 2}; m > 0; m >>= 1) s[r] += simd_xor(s[r], m);")
        # one lane of the team each finishes a row: mask, and the key's place in the chunk
        with out.block(f"for (int r = member; r < {self.rows}; r += {self.team}) {{"):
            out.add(self._row("r"), "float value = s[0];", "#pragma unroll")
            out.add(f"for (int n = 1; n < {self.rows}; n++) value = n == r ? s[n] : value;")
            if self.by_position and self.sq > 1:
                at = f"{self.f.pointer(3)}[i * {kernel.inputs[3].strides[0]}]"
                out.add(f"value = t <= {at} ? value : -m_inf_float();")
            elif not self.by_position and len(kernel.inputs) > 3:
                mask = kernel.inputs[3]
                text = read(self.f.pointer(3), self._place(mask, "b", "h", "i", "t"), mask.dtype).text
                out.add(
                    f"value = {text} ? value : -m_inf_float();" if mask.dtype == "bool" else f"value += (float){text};"
                )
            if kernel.attrs["causal"]:
                out.add("value = t <= i ? value : -m_inf_float();")
            out.add(f"score[r * {chunk} + j] = j < count && exists ? value : -m_inf_float();")

    def _softmax(self, chunk: int) -> None:
        """Each simd takes a row: scores become weights, ``scale`` is what earlier sums are worth now."""
        out = self.f.lines
        with out.block(f"for (int r = sid; r < {self.rows}; r += {THREADS // SIMD}) {{"):
            out.add("const float before = top[r];", "float most = before;")
            out.add(f"for (int j = lane; j < count; j += {SIMD}) most = m_max(most, score[r * {chunk} + j]);")
            out.add("most = simd_most(most);", "float sum = 0.0f;")
            with out.block(f"for (int j = lane; j < count; j += {SIMD}) {{"):
                out.add(f"const float x = score[r * {chunk} + j];")
                out.add("const float w = x == -m_inf_float() ? 0.0f : m_exp(x - most);")
                out.add(f"score[r * {chunk} + j] = w;", "sum += w;")
            out.add("sum = simd_sum(sum);")
            out.add("const float keep = before == -m_inf_float() ? 0.0f : m_exp(before - most);")
            out.add(
                "simd_barrier();",
                "if (lane == 0) { top[r] = most; scale[r] = keep; total[r] = total[r] * keep + sum; }",
            )

    def _values(self, chunk: int) -> None:
        out, v = self.f.lines, self.kernel.inputs[2]
        out.add("const int t = start + j;")
        self._vector(2, "value", self.dv, self._place(Operand(v.buffer, v.shape[:3], v.strides[:3]), "b", "hk", "t"))
        out.add("#pragma unroll")
        with out.block(f"for (int r = 0; r < {self.rows}; r++) {{"):
            out.add(f"const float w = score[r * {chunk} + j];", "#pragma unroll")
            out.add(f"for (int e = 0; e < {self.item}; e++) acc[r][e] += w * value[e];")

    def _finish(self, teams: int) -> None:
        """The teams' values meet in group memory, in one fixed order: as many rows at a time as it holds."""
        f, out, per = self.f, self.f.lines, THREADS // SIMD
        dim = self.team * self.item
        most = max(1, min(self.rows, MEET_BYTES // (per * dim * 4)))
        f.array("float", "meet", most * per * dim)
        if self.team < SIMD:  # first the teams of a simd
            out.add("#pragma unroll", f"for (int r = 0; r < {self.rows}; r++)")
            out.add("#pragma unroll", f"  for (int m = 16; m >= {self.team}; m >>= 1)", "#pragma unroll")
            out.add(f"    for (int e = 0; e < {self.item}; e++) acc[r][e] += simd_xor(acc[r][e], m);")
        for first in range(0, self.rows, most):
            rows = min(most, self.rows - first)
            if first:
                out.add("barrier();")
            with out.block(f"if (lane < {self.team}) {{"):
                out.add("#pragma unroll", f"for (int r = 0; r < {rows}; r++)", "#pragma unroll")
                place = f"(r * {per} + sid) * {dim} + d0 + e"
                out.add(f"  for (int e = 0; e < {self.item}; e++) meet[{place}] = acc[r + {first}][e];")
            out.add("barrier();")
            with out.block(f"for (int n = tid; n < {rows * self.dv}; n += {THREADS}) {{"):
                out.add(f"const int r = n / {self.dv} + {first}, d = n % {self.dv};", self._row("r"), "float x = 0.0f;")
                out.add("#pragma unroll")
                out.add(f"for (int s = 0; s < {per}; s++) x += meet[((r - {first}) * {per} + s) * {dim} + d];")
                self._store()
                if self.splits > 1:
                    at = self._part("split", "b", "h", "i")
                    out.add(f"if (d < 2 && exists) {f.pointer(~0)}[{at} + {self.dv} + d] = d ? total[r] : top[r];")

    def _store(self) -> None:
        f, out, o = self.f, self.f.lines, self.kernel.outputs[0]
        if self.splits > 1:
            out.add(f"if (exists) {f.pointer(~0)}[{self._part('split', 'b', 'h', 'i')} + d] = x;")
            return
        text = storage("(total[r] > 0.0f ? x / total[r] : 0.0f)", o.dtype)
        out.add(f"if (exists) {f.pointer(~0)}[{self._place(o, 'b', 'h', 'i', 'd')}] = {text};")

    def _part(self, split: str, b: str, h: str, i: str) -> str:
        return f"((({split} * {self.b} + {b}) * {self.h} + {h}) * {self.sq} + {i}) * {self.dv + 2}"


def emit_merge(kernel: Kernel, dialect: Dialect) -> Emission:
    """The function of ``attention_merge``: parts [S, B, H, SQ, D + 2] to [B, H, SQ, D]."""
    f = Function(kernel, dialect)
    out, parts, o = f.lines, kernel.inputs[0], kernel.outputs[0]
    splits, b, h, sq, width = parts.shape
    d = width - 2
    step, rows = b * h * sq * width, b * h * sq
    f.array("float", "weight", splits)
    f.array("float", "total", 1)
    f.array("float", "meet", MERGE_TEAMS * d)
    threads = MERGE_TEAMS * blocks(d, SIMD) * SIMD
    out.add(f"const int row = gid; DEVICE const float* const part = {f.pointer(0)} + row * {width};")
    with out.block("if (sid == 0) {"):  # one simd weighs the parts
        out.add("float most = -m_inf_float(), sum = 0.0f;", "#pragma unroll")
        out.add(f"for (int s = lane; s < {splits}; s += {SIMD}) most = m_max(most, part[s * {step} + {d}]);")
        out.add("most = simd_most(most);", "#pragma unroll")
        with out.block(f"for (int s = lane; s < {splits}; s += {SIMD}) {{"):
            out.add(f"const float m = part[s * {step} + {d}], n = part[s * {step} + {d + 1}];")
            out.add("const float w = m == -m_inf_float() ? 0.0f : m_exp(m - most);", "weight[s] = w;")
            out.add("sum += w > 0.0f ? w * n : 0.0f;")
        out.add("sum = simd_sum(sum);", "if (lane == 0) total[0] = sum > 0.0f ? 1.0f / sum : 0.0f;")
    out.add("barrier();")
    at = f"row / {h * sq} * {o.strides[0]} + row / {sq} % {h} * {o.strides[1]} + row % {sq} * {o.strides[2]}"
    out.add(f"const int team = tid / {threads // MERGE_TEAMS}, d = tid % {threads // MERGE_TEAMS};")
    with out.block(f"if (d < {d}) {{"):
        out.add("float x = 0.0f;", "#pragma unroll 16")
        out.add(f"for (int s = team; s < {splits}; s += {MERGE_TEAMS})")
        out.add(f"  x += weight[s] > 0.0f ? weight[s] * part[s * {step} + d] : 0.0f;", f"meet[team * {d} + d] = x;")
    out.add("barrier();")
    with out.block(f"if (tid < {d}) {{"):
        out.add("float x = 0.0f;", "#pragma unroll")
        out.add(f"for (int t = 0; t < {MERGE_TEAMS}; t++) x += meet[t * {d} + tid];")
        out.add(f"{f.pointer(~0)}[{at} + tid * {o.strides[3]}] = {storage('x * total[0]', o.dtype)};")
    return f.finish(rows, threads)
