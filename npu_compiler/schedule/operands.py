"""The memory of values: each value becomes a window of a buffer that is computed, loaded, viewed or copied."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from ..graph import expr
from ..graph.expr import Expr
from ..graph.graph import VIEWS, Graph, Node, Value
from ..graph.structure import looks_up, main_weight
from ..passes.load_time import static_values
from ..passes.quantize import dequantize_of, weight_keys
from ..support import dtypes
from ..support.errors import CompileError
from ..target_config import CompileChoices, TargetConfig
from ..weights.format import BlockFormat, Layout, WeightFormat, block_format, layout_for
from ..weights.packing import ELEMENTS, LIMBS, TF32, packed_spec
from .buffers import contiguous_strides
from .destination_passing import Destination, behind, part_of, wanted_order, writable
from .kernel import Buffer, Kernel, Loops, Operand, Unpack
from .strides import strided_view


def decoded(layout: Layout, operand: int, nbytes: int, position: Sequence[Expr]) -> Expr:
    """Return element [row, column] of a table in panels, of ``nbytes`` each, of a layout."""
    row, column = position
    panel = row // layout.panel
    narrow: dict[Expr, Expr] = {}

    def read(at: Expr) -> Expr:
        byte = expr.load(operand, "uint8", (panel, at))
        narrow[byte.cast("int64")] = byte.cast("int32")
        return byte.cast("int64")

    element: Expr = layout.element(read, lambda x: x.cast("float32"), row, column, nbytes)
    return _narrowed(element, frozenset(narrow), narrow)


def _narrowed(e: Expr, bytes_read: frozenset[Expr], known: dict[Expr, Expr]) -> Expr:
    """Return an element with int32 in place of int64, except in addresses, so that twice as many lanes fit a register.
    Its numbers, bytes and the fraction of a float32 number, have at most 24 bits."""
    if e not in known:
        if e.dtype != "float32" and bytes_read.isdisjoint(expr.walk(e)):
            known[e] = e.cast("int32")  # a place among bits
        else:
            args = [_narrowed(a, bytes_read, known) for a in e.args]
            known[e] = args[0].cast(e.dtype) if e.op == "cast" else expr.call(e.op, *args) if args else e
    return known[e]


class Operands:
    """The buffers of a graph and the values in them.

    ``format``: the weight format that the caller chose, or None; ``choices``: what else the caller chose. ``one_row``:
    keys of the weights that products of one row read, in this or another entry point of the program. ``recipes``
    collects the load-time values that fill weight buffers, by buffer name. ``kernels`` are the kernels so far, copies
    included."""

    def __init__(
        self,
        graph: Graph,
        config: TargetConfig,
        choices: CompileChoices,
        format: WeightFormat | None = None,
        one_row: frozenset[str] = frozenset(),
    ):
        self.graph, self.config, self.choices = graph, config, choices
        self.format, self.one_row = format, one_row
        self.static = static_values(graph)
        self.users = graph.users()
        self.results = graph.results()
        self.updates = set(graph.updates)
        self.kernels: list[Kernel] = []
        self.buffers: list[Buffer] = []
        self.recipes: list[tuple[str, Value]] = []
        self.place: dict[Value, Operand] = {}  # values that have memory
        self.packed: dict[Hashable, Operand] = {}
        self.unpacked: dict[Hashable, Operand] = {}
        self.wanted: dict[Value, Destination] = {}
        self.copies: dict[Value, Operand] = {}
        self.tables: dict[Value, Value] = {}  # read from the packed form of a matrix
        self.names: set[str] = set()

    def _buffer(self, kind: str, dtype: str, shape: Sequence[int], name: str, format: str = "") -> Buffer:
        buffer = Buffer(len(self.buffers), kind, dtype, tuple(shape), name, format=format)
        self.buffers.append(buffer)
        return buffer

    def _put(self, value: Value, buffer: Buffer) -> Operand:
        self.place[value] = Operand(buffer, value.shape, contiguous_strides(value.shape))
        return self.place[value]

    def _allocate(self, value: Value, made: dict[str, Buffer], label: str, vectors: bool = False) -> Operand:
        """Return memory for a kernel's result: an output, a part of a concatenation, or a block of the arena.
        ``vectors``: see :func:`writable`."""
        self.place[value] = self._destination(value, made, label, vectors) or self._block(value, label, vectors)
        return self.place[value]

    def _destination(self, value: Value, made: dict[str, Buffer], label: str, vectors: bool) -> Operand | None:
        want = self.wanted.get(value)
        if want is None:
            return None
        if want.concat is not None:
            whole = self.place.get(want.concat.out) or self._allocate(want.concat.out, made, label)
            window = behind(part_of(whole, want.concat, want.shape, want.start), want.path)
            return window if window is not None and writable(value, window, vectors) else None
        shape = want.path[-1].out.shape if want.path else value.shape
        buffer = self._buffer("output", value.dtype, shape, want.output)
        window = behind(Operand(buffer, shape, contiguous_strides(shape)), want.path)
        if window is None or not writable(value, window, vectors):
            self.buffers.pop()
            return None
        made[want.output] = buffer
        return window

    def _block(self, value: Value, label: str, vectors: bool) -> Operand:
        perm = wanted_order(value, self.users.get(value, []), vectors)
        shape = tuple(value.shape[p] for p in perm)
        buffer = self._buffer("arena", value.dtype, shape, label)
        strides = [0] * value.rank
        for p, s in zip(perm, contiguous_strides(shape), strict=True):
            strides[p] = s
        return Operand(buffer, value.shape, tuple(strides))

    def operand(self, v: Value) -> Operand:
        """Return the window in which a value can be read: its own memory, its source's through a view, or a copy if
        strides cannot express the view."""
        if v in self.place:
            return self.place[v]
        if v in self.static:
            return self._weight(v)
        if v.op in VIEWS:
            found = strided_view(self.operand(v.node.inputs[0]), v)
            if found is None:
                found = strided_view(self._copy(v.node.inputs[0]), v)
                assert found is not None
            return found
        raise CompileError(f"internal error: {v!r} is read before it is computed")

    def _weight(self, v: Value) -> Operand:
        if not self.config.packs_weights and (same := self._same_bytes(v)) is not None:
            self.place[v] = same
            return same
        name = self._unique(main_weight(v))
        self.recipes.append((name, v))
        layout = v.node.attrs["layout"] if v.op == "pack" else ""
        format = "" if layout in (*ELEMENTS, *LIMBS, TF32) else layout
        return self._put(v, self._buffer("weight", v.dtype, v.shape, name, format))

    def _same_bytes(self, v: Value) -> Operand | None:
        """Return the weight whose memory equals that of ``v``: the source of its views, if these keep the order of
        elements, else None."""
        path = []
        while v.op in VIEWS:
            path.append(v)
            v = v.node.inputs[0]
        if not path or v.numel != path[0].numel:
            return None
        found: Operand | None = Operand(
            Buffer(-1, "weight", v.dtype, v.shape, ""), v.shape, contiguous_strides(v.shape)
        )
        for view in reversed(path):
            found = strided_view(found, view) if found is not None else None
        return replace(found, buffer=self.operand(v).buffer) if found is not None and found.contiguous else None

    def _unique(self, name: str) -> str:
        n, candidate = 1, name
        while candidate in self.names:
            n += 1
            candidate = f"{name}#{n}"
        self.names.add(candidate)
        return candidate

    def packed_weight(self, key: Hashable, w: Value, layout: Layout | str) -> Operand:
        """Return ``w`` [G, K, T, C] in the order in which the target's micro-kernel reads it. ``key``: the weights that
        it is made of; equal ones are packed once."""
        if isinstance(layout, str) and layout != TF32 and not self.config.packs_weights:
            return self.operand(w)
        name, panel = (layout, self.config.panel or 1) if isinstance(layout, str) else (layout.name, layout.panel)
        if key not in self.packed:
            spec = packed_spec(name, w.shape, w.dtype, panel)
            node = self.graph.add("pack", [w], [spec], panel=panel, layout=name)
            node.sources = w.node.sources
            self.static.add(node.out)
            self.packed[key] = self._weight(node.out)
        return self.packed[key]

    def unpacked_weight(self, key: Hashable, w: Value, layout: Layout, dtype: str, k: int) -> Operand:
        """Return the elements [1, N, k] of a weight in a layout of a weight format, which a kernel decodes."""
        if key not in self.unpacked:
            source, shape = self.packed_weight(key, w, layout), (1, w.shape[1], k)
            out = Operand(self._buffer("arena", dtype, shape, "unpacked"), shape, contiguous_strides(shape))
            self._kernel(
                Unpack(label="unpack", inputs=(source,), outputs=(out,), n=shape[1], k=k, sources=w.node.sources)
            )
            self.unpacked[key] = out
        return self.unpacked[key]

    def _from_panels(self, table: Value, index: tuple[Expr, ...]) -> tuple[Operand, list[Expr]]:
        """Return where to read an element of a table that is stored only as the packed right operand of a product."""
        matrix = self.tables[table]
        packed = self.packed_weight((matrix,), self._columns([matrix]), self._element_order(table.dtype))
        panels, (row, column), width = packed.shape[1], index, self.config.panel
        pair = packed.shape[-1] if len(packed.shape) == 6 else 1
        depth = table.shape[1]
        window = Operand(packed.buffer, (panels, width, depth // pair, pair), (depth * width, pair, pair * width, 1))
        return window, [row // width, row % width, column // pair, column % pair]

    def _from_blocks(self, table: Value, node: Node) -> tuple[Operand, Layout] | None:
        """Return the packed blocks of a table of which ``node`` looks up elements, and their layout; None if it is not
        in blocks that kernels can look up."""
        if table.op != "dequantize" or table not in self.static or not looks_up(node, table, self.static):
            return None
        matrix = next((n.out for n in self.users[table] if n.op == "permute"), None)
        if matrix is None:
            matrix = table.permute(1, 0)
            self._static_chain(matrix)
        layout = self._format_layout(matrix)
        if layout is None or not layout.looks_up(*table.shape):
            return None
        return self.packed_weight((matrix,), self._columns([matrix], stored=True), layout), layout

    def _copy(self, v: Value) -> Operand:
        """Return a contiguous copy of a value, which is made before its first use."""
        if v not in self.copies:
            source = self.operand(v)
            if source.contiguous:
                return source
            out = Operand(self._buffer("arena", v.dtype, v.shape, "copy"), v.shape, contiguous_strides(v.shape))
            self._kernel(Loops.copy(source, out, v.node.sources))
            self.copies[v] = out
        return self.copies[v]

    def _copy_out(self, name: str, v: Value) -> Buffer:
        buffer, ordered = self._buffer("output", v.dtype, v.shape, name), v
        while ordered.op == "reshape":  # which keeps the order of elements, but may need a copy of its own
            ordered = ordered.node.inputs[0]
        out = Operand(buffer, ordered.shape, contiguous_strides(ordered.shape))
        self._kernel(Loops.copy(self.operand(ordered), out, v.node.sources))
        return buffer

    def _update_states(self) -> None:
        """Add the updates of states after all reads of their old contents. If an update reads a state that it or
        another one overwrites, the contents are copied first."""
        states = {n.attrs["key"]: self.place[n.out] for n in self.graph.nodes if n.op == "state"}
        moves = [(self.operand(v), states[key], v) for key, v in self.graph.updates]
        moves = [move for move in moves if move[0] != move[1]]
        overwritten = {target.buffer.id for _, target, _ in moves}
        for i, (source, target, v) in enumerate(moves):
            if source.buffer.id in overwritten:
                spare = Operand(self._buffer("arena", v.dtype, v.shape, "old"), v.shape, contiguous_strides(v.shape))
                self._kernel(Loops.copy(source, spare, v.node.sources))
                moves[i] = (spare, target, v)
        for source, target, v in moves:
            self._kernel(Loops.copy(source, target, v.node.sources))

    def _kernel(self, kernel: Kernel) -> None:
        self.kernels.append(replace(kernel, number=len(self.kernels)))

    def _static_chain(self, v: Value) -> None:
        """Mark the nodes that were built from static values as static."""
        if v not in self.static:
            self.static.add(v)
            for x in v.node.inputs:
                self._static_chain(x)

    def _columns(self, matrices: list[Value], stored: bool = False) -> Value:
        """Return the columns [1, N, 1, K] of a [K, N] matrix as a load-time value; the panels of two matrices
        alternate. ``stored``: for a weight format, which takes the blocks of a matrix that is in blocks."""
        n = matrices[0].shape[1]
        found = [dequantize_of(w) if stored else None for w in matrices]
        rows = [b.inputs[0] if b else w.permute(1, 0) for b, w in zip(found, matrices, strict=True)]
        k = rows[0].shape[1]
        if len(rows) > 1:
            width = self.config.pair_width
            panels = [w.reshape(n // width, 1, width, k) for w in rows]
            rows = [self.graph.concat(panels, 1)]
        view = rows[0].reshape(1, n * len(matrices), 1, k)
        self._static_chain(view)
        return view

    def _element_order(self, dtype: str) -> str:
        """Return the order of elements in a packed weight."""
        if dtypes.DTYPES[dtype].size == 1:
            return "vnni4"
        return "vnni2" if dtype in self.config.pair_dtypes else "panels"

    def _format_layout(self, matrix: Value) -> Layout | None:
        """Return the layout in which the program stores the [K, N] right operand of products, or None if it stores the
        elements."""
        k, n = matrix.shape
        blocks = dequantize_of(matrix)
        format = self.format if blocks is None else block_format(blocks.attrs["format"])
        if format is None or isinstance(format, BlockFormat) != (blocks is not None):
            return None
        return layout_for(format, self.config.panel, n, k, matrix.dtype)

    def _reads_elements(self, matrix: Value, layout: Layout | None, rows: int) -> bool:
        """Whether products of ``rows`` rows read elements that the program stores, although it may store the matrix in
        ``layout``, too: if the layout cannot be read with so many rows, and decoding it in every run does not pay. For
        a lossless format that is so unless a product of one row reads the layout."""
        if layout is None or rows <= (layout.max_rows or rows):
            return layout is None
        lossless = dequantize_of(matrix) is None
        return self.choices.speed_over_memory or (lossless and not weight_keys(matrix) & self.one_row)
