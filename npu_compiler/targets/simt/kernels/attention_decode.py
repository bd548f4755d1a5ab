"""Attention of one query position against a cache: a decode step's rotary embedding, cache update, attention and merge
in one launch.

A group takes all heads that share a key/value head and a range of the keys; its simds take 16 keys at a time. Keys and
values go from memory into the registers that the matrix unit reads (which element is which along a summed dim is a
matter of taste, so every lane loads 16 bytes in a row), those of earlier positions before the inputs are awaited. The
row of this position is made by the group whose range holds it. Groups without keys leave at once. Those with keys wait
for each other and add up a share of the results each, from the parts of all, in order: the last would take long alone,
behind all that the next kernel asks for ahead of time. Results do not depend on who adds what.
"""

from __future__ import annotations

import math

from ....graph import expr
from ....schedule.kernel import Attention, DecodeAttention, Loops, Operand
from ....support import dtypes
from ...codegen.nest import build_nest
from ..lang.dialect import SIMD, Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import Scalars, Value, literal, storage, stored
from ..lang.vectorize import Points, decode, scalars_for

SIMDS = 16
THREADS = SIMDS * SIMD
PER_CORE = 1  # groups
KEYS = 16  # that a simd takes at a time
HEADS = 8  # columns of the matrix unit
LEAST_KEYS = 256  # of a group: fewer are not worth a meeting
PITCH = 4 * SIMD + 1  # of a lane's four values of 16 elements
STATE = 8  # words of a meeting: those of up to 224 groups
PAD = 4  # elements behind the values of a part: their maximum and sum, and nothing
SIZES = (64, 128)  # of a head


def emit_attention_step(kernel: DecodeAttention, dialect: Dialect) -> Emission:
    """``attention_step``: inputs keys and values [1, HK, SK, D], position int64[1], then those of the parts; outputs
    the result, keys, values, float32 parts [S, H, D + 4] (values, maximum, sum), and int32 states of meetings
    [HK, STATE], zero at first.

    ``parts``: loops kernels that make the queries [1, H, 1, D], and rows of keys and of values at the position.
    """
    return _Step(kernel, dialect).emit()


class _Step:
    def __init__(self, kernel: DecodeAttention, dialect: Dialect):
        self.kernel, self.f = kernel, Function(kernel, dialect, early=True, release=False)
        keys, out = kernel.inputs[0], kernel.outputs[0]
        self.hk, self.sk, self.d = keys.shape[1:]
        self.h = out.shape[1]
        self.share = self.h // self.hk
        self.splits = kernel.outputs[3].shape[0]
        self.slot = self.d // 16 * PITCH  # a simd's values in group memory
        self.dtype, self.ctype = keys.dtype, dtypes.DTYPES[keys.dtype].ctype
        self.kp, self.vp = self.d // 32, self.d // 64  # 16-byte pieces of a lane: of each key, of each value
        self.numbers: list[dict[int, int]] = []
        first = 3
        for part in kernel.producers:
            self.numbers.append({n: first + n for n in range(len(part.inputs))})
            first += len(part.inputs)

    def emit(self) -> Emission:
        f, out = self.f, self.f.lines
        f.per_core = PER_CORE
        f.array(self.ctype, "qs", HEADS * self.d)
        f.array(self.ctype, "fresh", 2 * self.d)  # this position's key and value
        f.array("float", "meet", SIMDS // 2 * self.slot)
        f.array("float", "tops", SIMDS // 2 * HEADS)
        f.array("float", "sums", SIMDS // 2 * HEADS)
        self._range()
        self._fetch()
        out.add("wait_inputs();")
        self._rows()
        out.add("barrier();", f"FragC o[{self.d // 16}];", "#pragma unroll")
        out.add(f"for (int n = 0; n < {self.d // 16}; n++) frag_zero(o[n]);")
        out.add("float top[2] = {-m_inf_float(), -m_inf_float()}, sum[2] = {0.0f, 0.0f};")
        with out.block(f"for (int at = first; at < end; at += {SIMDS * KEYS}) {{"):
            self._fresh_rows()
            self._scores()
            out.add(f"if (at + {SIMDS * KEYS} < known) load_keys(at + {SIMDS * KEYS});")
            self._weights()
            self._values()
            out.add(f"if (at + {SIMDS * KEYS} < known) load_values(at + {SIMDS * KEYS});")
        self._meet()
        self._merge()
        return f.finish(self.splits * self.hk, THREADS)

    def _range(self) -> None:
        """``begin`` to ``end``: the keys of this group; ``active``: the groups of a key/value head that have some."""
        out = self.f.lines
        out.add(f"const int hk = gid % {self.hk}, split = gid / {self.hk};")
        out.add(f"const int64_t place = {self.f.pointer(2)}[0];")
        out.add(f"const int now = place < 0 ? 0 : place < {self.sk} ? (int)place : {self.sk - 1}, valid = now + 1;")
        out.add(f"int share = (valid + {self.splits * KEYS - 1}) / {self.splits * KEYS} * {KEYS};")
        out.add(f"share = share > {LEAST_KEYS} ? share : {LEAST_KEYS};")
        out.add("const int active = (valid + share - 1) / share;")
        out.add("if (split >= active) return;")
        out.add("const int begin = split * share, end = begin + share < valid ? begin + share : valid;")
        out.add(f"const int first = begin + sid * {KEYS}, row = lane >> 2, column = lane & 3;")

    def _fetch(self) -> None:
        """Loads of 16 keys and values from ``at`` on; those from this position on are put right later."""
        out = self.f.lines
        for number, name in ((0, "keys"), (1, "values")):
            op = self.kernel.inputs[number]
            out.add(f"DEVICE const {self.ctype}* const {name} = {self.f.pointer(number)} + hk * {op.strides[1]};")
        out.add(f"uint4 k[2][{self.kp}], v[4][{self.vp}];")
        for name, rows, pieces, t, d in self._pieces:
            op = self.kernel.inputs[int(name == "v")]
            what = "keys" if name == "k" else "values"
            with out.block(f"const auto load_{what} = [&](int at) {{", "};"):
                out.add("#pragma unroll")
                with out.block(f"for (int i = 0; i < {rows}; i++) {{"):
                    out.add(f"const int t = at + {t} < valid ? at + {t} : now;", "#pragma unroll")
                    out.add(f"for (int j = 0; j < {pieces}; j++)")
                    out.add(f"  {name}[i][j] = stream16({what} + (int64_t)t * {op.strides[2]} + {d});")
        out.add("const int known = end < now ? end : now;")
        out.add("load_keys(first);", "load_values(first);")

    @property
    def _pieces(self) -> tuple[tuple[str, int, int, str, str], ...]:
        """Registers of a lane: name, rows, pieces of each; which row and which element."""
        return (
            ("k", 2, self.kp, "row + 8 * i", "j * 32 + column * 8"),
            ("v", 4, self.vp, "2 * column + (i & 1) + 8 * (i >> 1)", "j * 64 + row * 8"),
        )

    def _rows(self) -> None:
        """``qs``: the queries of this group, zeros below; ``fresh``: the rows of this position, which go to memory
        too. First all loads, then all values: so the loads do not wait for each other."""
        f, out, kernel, d = self.f, self.f.lines, self.kernel, self.d
        points = [
            _Points(f, p, n, f"p{i}_") for i, (p, n) in enumerate(zip(kernel.producers, self.numbers, strict=True))
        ]
        turns, count = blocks(HEADS * d, THREADS), self.share * d
        queries, *rows = points
        out.add(f"float made[{turns}], fresh_made[2];")
        point = f"(uint)(hk * {count} + (n < {count} ? n : 0))"
        queries.load(turns, f"const int n = i * {THREADS} + tid; const uint point = {point};")
        for p in rows:
            p.load(1, f"const uint point = (uint)(hk * {d} + tid % {d});")
        out.add("release_next();  // the next kernel's weights would delay the loads above")
        for number, p in enumerate(rows):
            p.make(1, f"const uint point = (uint)(hk * {d} + tid % {d});", f"(fresh_made + {number} + i)")
        queries.make(turns, f"const int n = i * {THREADS} + tid; const uint point = {point};", "(made + i)")
        out.add("#pragma unroll")
        value = storage(f"n < {count} ? made[i] : 0.0f", self.dtype)
        out.add(f"for (int i = 0, n = tid; i < {turns} && n < {HEADS * d}; i++, n += {THREADS}) qs[n] = {value};")
        for number, p in enumerate(rows):
            with out.block(f"if (now >= begin && now < end && tid / {d} == {number}) {{"):
                row = storage(f"fresh_made[{number}]", self.dtype)
                out.add(f"const uint point = (uint)(hk * {d} + tid % {d});")
                place = p.place()
                out.add(f"{f.pointer(~(1 + number))}[{place}] = {row};", f"fresh[tid] = {row};")

    def _fresh_rows(self) -> None:
        """This position's rows where they belong; no values beyond it: they may be anything."""
        out = self.f.lines
        with out.block(f"if (at + {KEYS} > now) {{"):
            for name, rows, pieces, t, d in self._pieces:
                out.add("#pragma unroll", f"for (int i = 0; i < {rows}; i++)", "#pragma unroll")
                with out.block(f"  for (int j = 0; j < {pieces}; j++) {{"):
                    place = d if name == "k" else f"{self.d} + {d}"
                    out.add(f"if (at + {t} == now) {name}[i][j] = *(GROUP const uint4*)(fresh + {place});")
                    if name == "v":
                        out.add(f"if (at + {t} > now) {name}[i][j] = zero16();")

    def _scores(self) -> None:
        """``s``: 16 keys by 8 heads. Element 2t of a sum is the same element of a piece in keys and in queries."""
        out = self.f.lines
        out.add("FragC s[2];", "frag_zero(s[0]); frag_zero(s[1]);", "#pragma unroll")
        with out.block(f"for (int j = 0; j < {self.kp}; j++) {{"):
            out.add(f"const uint4 q = *(GROUP const uint4*)(qs + row * {self.d} + j * 32 + column * 8);")
            out.add(f"FragA<{self.ctype}> x, y;", f"FragB<{self.ctype}> a, b;")
            out.add("frag_b_of(a, q.x, q.y, lane);", "frag_b_of(b, q.z, q.w, lane);")
            out.add("frag_a_of(x, k[0][j].x, k[1][j].x, k[0][j].y, k[1][j].y, lane);")
            out.add("frag_a_of(y, k[0][j].z, k[1][j].z, k[0][j].w, k[1][j].w, lane);")
            out.add("frag_mma(s[0], x, a);", "frag_mma(s[1], y, b);")

    def _weights(self) -> None:
        """Scores to weights; exponents are of two. A lane has two heads, of keys ``row`` and ``row + 8``."""
        out, scale = self.f.lines, literal(self.kernel.scale * math.log2(math.e), "float")
        out.add("#pragma unroll")
        with out.block("for (int c = 0; c < 2; c++) {"):
            out.add("#pragma unroll")
            with out.block("for (int e = c; e < 4; e += 2) {"):
                out.add(f"const float x = (s[0].v[e] + s[1].v[e]) * {scale};")
                out.add("s[0].v[e] = at + row + 4 * (e - c) < end ? x : -m_inf_float();")
            out.add("float most = m_max(top[c], m_max(s[0].v[c], s[0].v[c + 2]));", "#pragma unroll")
            out.add("for (int m = 4; m < 32; m <<= 1) most = m_max(most, simd_xor(most, m));")
            out.add("const float keep = m_exp2(top[c] - most);", "top[c] = most;")
            out.add("s[0].v[c] = m_exp2(s[0].v[c] - most);", "s[0].v[c + 2] = m_exp2(s[0].v[c + 2] - most);")
            out.add("sum[c] = sum[c] * keep + s[0].v[c] + s[0].v[c + 2];", "#pragma unroll")
            out.add(f"for (int n = 0; n < {self.d // 16}; n++) {{ o[n].v[c] *= keep; o[n].v[c + 2] *= keep; }}")

    def _values(self) -> None:
        """``o``: 16 elements by 8 heads; lane ``row`` has elements e and e + 1 of its pieces, from four values each."""
        out = self.f.lines
        out.add(f"FragB<{self.ctype}> w;", "frag_b_turned(w, s[0], lane);", "#pragma unroll")
        with out.block(f"for (int j = 0; j < {self.vp}; j++) {{"):
            for n, word in enumerate("xyzw"):
                low, high = (f"v[{i}][j].{word}, v[{i + 1}][j].{word}" for i in (0, 2))
                out.add(
                    f"{{ FragA<{self.ctype}> x; frag_a_of(x, pair_low({low}), pair_high({low}), pair_low({high}), "
                    f"pair_high({high}), lane); frag_mma(o[4 * j + {n}], x, w); }}"
                )

    def _meet(self) -> None:
        """The simds' values in group memory: those of the upper half join those of the lower half."""
        out, half = self.f.lines, SIMDS // 2
        out.add("#pragma unroll", "for (int c = 0; c < 2; c++)", "#pragma unroll")
        out.add("  for (int m = 4; m < 32; m <<= 1) sum[c] += simd_xor(sum[c], m);")
        out.add(f"GROUP float* const my_top = tops + sid % {half} * {HEADS} + 2 * column;")
        out.add(f"GROUP float* const my_sum = sums + sid % {half} * {HEADS} + 2 * column;")
        out.add(f"GROUP float* const mine = meet + sid % {half} * {self.slot} + lane;")
        with out.block(f"if (sid >= {half}) {{"):
            self._leave()
        out.add("barrier();")
        with out.block(f"if (sid < {half}) {{"):
            out.add("simd_barrier();", "#pragma unroll")
            with out.block("for (int c = 0; c < 2; c++) {"):
                out.add("const float other = my_top[c], most = m_max(top[c], other);")
                out.add("const float base = most == -m_inf_float() ? 0.0f : most;  // neither may have had keys")
                out.add("const float a = m_exp2(top[c] - base), b = m_exp2(other - base);")
                out.add("top[c] = most;", "sum[c] = sum[c] * a + my_sum[c] * b;", "#pragma unroll")
                with out.block(f"for (int n = 0; n < {self.d // 16}; n++) {{"):
                    out.add(f"GROUP const float* const at = {self._at('n')};")
                    out.add("o[n].v[c] = o[n].v[c] * a + at[0] * b;", "o[n].v[c + 2] = o[n].v[c + 2] * a + at[32] * b;")
            out.add("simd_barrier();")
            self._leave()
        out.add("barrier();")

    def _leave(self) -> None:
        out = self.f.lines
        out.add("if (row == 0) { my_top[0] = top[0]; my_top[1] = top[1]; my_sum[0] = sum[0]; my_sum[1] = sum[1]; }")
        out.add("#pragma unroll", "for (int c = 0; c < 2; c++)", "#pragma unroll")
        with out.block(f"  for (int n = 0; n < {self.d // 16}; n++) {{"):
            out.add(f"GROUP float* const at = {self._at('n')};", "at[0] = o[n].v[c];", "at[32] = o[n].v[c + 2];")

    def _at(self, n: str) -> str:
        """Where a lane leaves values 16 n of its column c: lane by lane, and shifted so that a row is read without
        conflicts, too (even n first: a thread reads n and n + 1)."""
        return f"mine + ({n} % 2 * {self.d // 32} + {n} / 2) * {PITCH} + c * 64"

    def _merge(self) -> None:
        """The group's own part, then its share of the results. A thread has 4 elements of a row."""
        f, out, d, half = self.f, self.f.lines, self.d, SIMDS // 2
        items = self.share * d // 4
        out.add(f"const int item = tid % {items}, r = item / {d // 4}, e0 = item % {d // 4} * 4;")
        out.add(f"DEVICE float* const parts = {f.pointer(~3)} + (hk * {self.share} + r) * {d + PAD};")
        place = f"(e0 / 64 * 2 + e0 % 8 / 4) * {PITCH} + r % 2 * 64 + e0 % 64 / 8 * 4 + r / 2"
        out.add(f"GROUP const float* const theirs = meet + {place};")
        out.add("Vec<float, 4> x = {};", "float most = tops[r], total = 0.0f;", "#pragma unroll")
        out.add(f"for (int s = 1; s < {half}; s++) most = m_max(most, tops[s * {HEADS} + r]);")
        with out.block(f"if (tid < {items}) {{"):
            out.add("#pragma unroll")
            with out.block(f"for (int s = 0; s < {half}; s++) {{"):
                out.add(f"const float w = m_exp2(tops[s * {HEADS} + r] - most);")
                out.add(f"total += w * sums[s * {HEADS} + r];", "#pragma unroll")
                place = f"s * {self.slot} + e / 2 * {d // 32 * PITCH} + e % 2 * 32"
                out.add(f"for (int e = 0; e < 4; e++) x.v[e] += w * theirs[{place}];")
            if self.splits > 1:
                with out.block("if (active > 1) {"):
                    out.add(f"DEVICE float* const part = parts + split * {self.h * (d + PAD)};")
                    out.add("*(DEVICE Vec<float, 4>*)(part + e0) = x;")
                    out.add("const Vec<float, 4> extent = {{most, total, 0.0f, 0.0f}};")
                    out.add(f"if (e0 == 0) *(DEVICE Vec<float, 4>*)(part + {d}) = extent;")
        if self.splits > 1:
            with out.block("if (active > 1) {"):
                self._meet_groups(items)
        self._store("tid", f"tid < {items}", "x", "total")

    def _store(self, item: str, guard: str, x: str, total: str) -> None:
        out, o = self.f.lines, self.kernel.outputs[0]
        with out.block(f"if ({guard}) {{"):
            out.add(f"const int head = hk * {self.share} + {item} / {self.d // 4}, e = {item} % {self.d // 4} * 4;")
            out.add("#pragma unroll", "for (int n = 0; n < 4; n++)")
            value = storage(f"{x}.v[n] / {total}", o.dtype)
            out.add(f"  {self.f.pointer(~0)}[head * {o.strides[1]} + (e + n) * {o.strides[3]}] = {value};")

    def _meet_groups(self, items: int) -> None:
        """A group's share: ``each`` items of four results."""
        f, out = self.f, self.f.lines
        f.array("int", "role", 1)
        out.add(f"DEVICE int* const state = {f.pointer(~4)} + hk * {STATE};")
        out.add(f"const int each = ({items} + active - 1) / active;", "barrier();")
        out.add(f"if (tid == 0) role[0] = meet_groups(state, split, active, split * each < {items});", "barrier();")
        out.add("if (role[0] == 0) return;")
        with out.block("if (role[0] == 1) {"):
            self._add_up("split", items)
        with out.block("else for (int other = 0; other < active; other++) {"):
            out.add("if (other != split && (state[1 + other / 32] >> other % 32 & 1) == 0) continue;")
            self._add_up("other", items)
        with out.block("if (role[0] == 2) {"):
            out.add("barrier();", f"if (tid > 0 && tid < {STATE}) state[tid] = 0;")
        out.add("return;")

    def _add_up(self, which: str, items: int) -> None:
        """Results of share ``which``: a simd for four, each lane some of the parts."""
        out, turns, size = self.f.lines, blocks(self.splits, SIMD), self.h * (self.d + PAD)
        out.add(f"const int behind = ({which} + 1) * each < {items} ? ({which} + 1) * each : {items};")
        with out.block(f"for (int i = {which} * each + sid; i < behind; i += {SIMDS}) {{"):
            out.add(f"const int r = i / {self.d // 4}, e = i % {self.d // 4} * 4;")
            out.add(f"DEVICE const float* const row = {self.f.pointer(~3)} + (hk * {self.share} + r) * {self.d + PAD};")
            out.add(f"Vec<float, 4> a[{turns}], extent[{turns}], x = {{}};", "#pragma unroll")
            with out.block(f"for (int n = 0; n < {turns}; n++) {{"):
                out.add(f"const int s = n * {SIMD} + lane;")
                out.add(f"DEVICE const float* const part = row + (s < active ? s : 0) * {size};")
                out.add("a[n] = *(DEVICE const Vec<float, 4>*)(part + e);")
                out.add(f"extent[n] = *(DEVICE const Vec<float, 4>*)(part + {self.d});")
            out.add("float most = -m_inf_float(), total = 0.0f;", "#pragma unroll")
            out.add(f"for (int n = 0; n < {turns}; n++) most = m_max(most, extent[n].v[0]);", "most = simd_most(most);")
            out.add("#pragma unroll")
            with out.block(f"for (int n = 0; n < {turns}; n++) {{"):
                out.add(f"const float w = n * {SIMD} + lane < active ? m_exp2(extent[n].v[0] - most) : 0.0f;")
                out.add("total += w * extent[n].v[1];", "#pragma unroll")
                out.add("for (int q = 0; q < 4; q++) x.v[q] += w * a[n].v[q];")
            out.add("total = simd_sum(total);", "#pragma unroll")
            out.add("for (int q = 0; q < 4; q++) x.v[q] = simd_sum(x.v[q]);")
            self._store("i", "lane == 0", "x", "total")


class _Points:
    """Points of a part, one for each thread and turn ``i``: what is needed from memory, then the values."""

    def __init__(self, function: Function, part: Loops, numbers: dict[int, int], tag: str):
        self.f, self.numbers, self.tag = function, numbers, tag
        self.nest = build_nest(part)
        (self.step,) = self.nest.steps
        loads = {x: None for x in expr.walk(self.step.value) if x.op == "load"}
        nested = {x for x in loads if any(y in loads for a in x.args for y in expr.walk(a))}
        self.loads = [x for x in loads if not x.value.checks and x not in nested]

    def _scalars(self) -> Scalars:
        return scalars_for(self.nest, self.f, self.nest.steps, self.numbers)

    def load(self, turns: int, header: str) -> None:
        """``header`` declares ``point``. Loads that a ``where`` guards stay inside their operands."""
        out, s = self.f.lines, self._scalars()
        for n, x in enumerate(self.loads):
            out.add(f"{dtypes.DTYPES[x.dtype].ctype} {self.tag}{n}[{turns}];")
        out.add("#pragma unroll")
        with out.block(f"for (int i = 0; i < {turns}; i++) {{"):
            out.add(header)
            decode(s, self.nest, self.nest.order, "point")
            for n, x in enumerate(self.loads):
                op = self.nest.inputs[x.value.operand]
                at = s.address(x)
                if x.value.guarded:
                    most = sum((size - 1) * step for size, step in zip(op.shape, op.strides, strict=True))
                    out.add(f"const int64_t at{n} = {at};")
                    at = f"(at{n} < 0 ? 0 : at{n} < {most} ? at{n} : {most})"
                out.add(f"{self.tag}{n}[i] = {s.pointers[x.value.operand]}[{at}];")

    def make(self, turns: int, header: str, sink: str) -> None:
        """The values at the points, into a float array."""
        out, s = self.f.lines, self._scalars()
        for n, x in enumerate(self.loads):
            s.bound[x] = stored(f"{self.tag}{n}[i]", x.dtype)
        out.add("#pragma unroll")
        with s.scope(f"for (int i = 0; i < {turns}; i++) {{"):
            out.add(header)
            decode(s, self.nest, self.nest.order, "point")
            Points(s, self.nest, -1, 1).run([self.step], sink=sink)
        self.f.checks |= s.checks

    def place(self) -> str:
        """Where the value at ``point`` goes."""
        s = self._scalars()
        decode(s, self.nest, self.nest.order, "point")
        assert self.step.target is not None
        for x in expr.walk(self.step.target):
            if x.op == "load" and x is not self.step.target:  # the position
                s.bound[x] = Value("place", "int64_t")
        place = s.address(self.step.target)
        self.f.checks |= s.checks
        return place


def takes_step(k: Attention, dialect: Dialect) -> bool:
    """Whether attention kernel ``k`` is one query position against a cache in a layout that the step's kernel reads."""
    q, keys, values = k.inputs[:3]
    out = k.outputs[0]
    (b, h, sq, d), hk = q.shape, keys.shape[1]
    dense = q.contiguous and q.offset == 0 and all(_dense_rows(o) for o in (keys, values))
    position = k.inputs[3].buffer if k.by_position else None
    return (
        dialect.flash and dialect.ordered and q.dtype in dialect.matrix_types and (b, sq) == (1, 1) and dense
        and all(o.dtype == q.dtype for o in (keys, values, out)) and keys.shape == values.shape and d in SIZES
        and not k.causal and position is not None and position.kind in ("input", "state") and h // hk <= HEADS
    )  # fmt: skip


def _dense_rows(op: Operand) -> bool:
    return op.strides[3] == 1 and op.offset % 8 == 0 and op.strides[2] % 8 == 0 and (op.strides[1] % 8 == 0)
