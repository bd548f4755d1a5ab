"""Kernels of products, convolutions and attention: their operands in the order that they read, and their epilogues."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..graph import expr
from ..graph.expr import Expr
from ..graph.graph import Graph, Node, Value
from ..passes.fold import unrounded
from ..passes.fuse import Group
from ..support import dtypes
from ..target_config import CompileChoices, TargetConfig
from ..weights.format import WeightFormat
from ..weights.packing import ELEMENTS, LIMBS, LIMBS_OF, TF32, packed_spec
from .anchors import Anchor, Attention, Conv2d, DepthwiseConv2d, Gemm, WinogradConv2d
from .buffers import contiguous_strides
from .image_rows import filter_rows, is_image, padded_image, row_dtype
from .kernel import Buffer, Loops, Operand, Pack
from .operands import Operands
from .strides import reshape_strides

TF32_ROWS = 16  # products of so few rows are limited by memory, and are not rounded to TF32

# From a convolution to the filter transform G [points, 3] of its Winograd kernel, or None for direct convolution.
Winograd = Callable[[Node], np.ndarray | None]


class Contractions(Operands):
    """Adds the kernels whose main loop is written by hand; the rest of their group is their epilogue.

    ``winograd`` and ``in_limbs`` choose the kernel of a convolution."""

    def __init__(
        self,
        graph: Graph,
        config: TargetConfig,
        choices: CompileChoices,
        winograd: Winograd = lambda node: None,
        format: WeightFormat | None = None,
        one_row: frozenset[str] = frozenset(),
        in_limbs: Callable[[Node], bool] = lambda node: False,
    ):
        super().__init__(graph, config, choices, format, one_row)
        self.winograd, self.in_limbs = winograd, in_limbs

    def _epilogue(self, group: Group, fixed: list[Operand]) -> tuple[Expr, list[Operand], Value]:
        """Return the epilogue of an anchor, its operands (after ``fixed``), and the value that is stored. Sums of
        integers that are computed in float32 are converted."""
        inputs = list(fixed)
        floating = dtypes.is_float(fixed[0].dtype)
        known = {
            n.out: expr.acc("float32", number).cast("int32")
            if floating and not dtypes.is_float(n.out.dtype)
            else expr.acc(n.out.dtype, number)
            for number, n in enumerate(group.anchors)
        }
        for node in group.nodes[len(known) :]:

            def through(load: Expr, node: Node = node) -> Expr:
                v = node.inputs[load.value]
                if v in known:
                    return known[v]
                op = self.operand(v)
                if op not in inputs[len(fixed) :]:
                    inputs.append(op)
                return expr.load(len(fixed) + inputs[len(fixed) :].index(op), v.dtype, load.args)

            known[node.out] = expr.drop_roundings(expr.substitute(node.attrs["expr"], loads=through))
        value = group.nodes[-1].out
        return known[value], inputs, value

    def _anchor(
        self, group: Group, made: dict[str, Buffer], kind: type[Anchor], fixed: list[Operand], flops: int, **own: Any
    ) -> None:
        """Add a kernel of class ``kind`` with its ``own`` fields and the epilogue of the group."""
        e, inputs, value = self._epilogue(group, fixed)
        out = self._allocate(value, made, group.anchor.label, vectors=self.config.vector_lanes > 0)
        own |= {"epilogue": e, "sources": group.sources, "flops": flops}
        self._kernel(kind(label=kind.kind, inputs=tuple(inputs), outputs=(out,), **own))

    def _conv2d(self, group: Group, made: dict[str, Buffer]) -> None:
        node = group.anchor
        x, w = node.inputs
        k, r, s, cg = w.shape
        groups = node.attrs["groups"]
        own = dict(node.attrs) | {"kernel_size": (r, s), "channels": (x.shape[3], k)}
        flops = 2 * node.out.numel * r * s * cg
        if w in self.static and is_image(node, self.config.image_row):
            self._image(group, made, flops)
            return
        source = self._dense(x)
        if groups == k == x.shape[3]:
            weight = (
                self.operand(w.permute(1, 2, 3, 0).reshape(r, s, k)) if w not in self.static else self._static_view(w)
            )
            self._anchor(group, made, DepthwiseConv2d, [source, weight], flops, **own)
            return
        order, tf32 = self._element_order(x.dtype), self._rounds(math.prod(node.out.shape[:-1]), x.dtype)
        if w not in self.static:
            filters = self._packed_filters(w, groups, order)
            self._anchor(group, made, Conv2d, [source, filters], flops, tf32=tf32, **own)
            return
        transform = self.winograd(node)
        if transform is not None:
            weight = self.packed_weight((w, len(transform)), self._winograd_weight(w, transform), "panels")
            g = tuple(map(tuple, transform.tolist()))
            self._anchor(group, made, WinogradConv2d, [source, weight], flops, transform=g, **own)
            return
        rows = groups == 1 and own["dilation"][1] == 1 and cg % ELEMENTS[order] != 0 and x.dtype == "uint8"
        view = w.reshape(groups, k // groups, *((r, s * cg) if rows else (r * s, cg)))  # see ConvPlan in conv.h
        self._static_chain(view)
        if self.in_limbs(node):
            order = LIMBS_OF[w.dtype]
            own["limbs"] = LIMBS[order]
        rounded = tf32 and groups == 1
        order = TF32 if rounded else order
        weight = self.packed_weight((w, order), view, order)
        self._anchor(group, made, Conv2d, [source, weight], flops, tf32=tf32, rounded=rounded, **own)

    def _rounds(self, rows: int, dtype: str) -> bool:
        """Whether operands of ``dtype`` are rounded in a product of ``rows`` rows."""
        return self.choices.float32_precision == "tf32" and dtype == "float32" and rows > TF32_ROWS

    def _image(self, group: Group, made: dict[str, Buffer], flops: int) -> None:
        """Add a convolution of few channels, over rows of padded pixels."""
        node, row = group.anchor, self.config.image_row
        x, w = node.inputs
        source, dtype = self.operand(x), row_dtype(node)
        body, whole, rows, own = padded_image(node, source, row, lambda n: self._buffer("arena", dtype, n, "padded"))
        self._kernel(Loops(label="copy", inputs=(source,), outputs=(whole,), body=body, sources=node.sources))
        view = filter_rows(node, row)
        self._static_chain(view)
        weight = self.packed_weight((w, row), view, self._element_order(dtype))
        self._anchor(group, made, Conv2d, [rows, weight], flops, **own)

    def _winograd_weight(self, w: Value, g: np.ndarray) -> Value:
        """Return G w G^T of every filter as load-time nodes, float32 [1, K, points^2, C], computed in float64."""
        source = unrounded(w)
        k, _, _, c = source.shape
        both = self.graph.const(np.kron(g, g))
        points = both.matmul(source.permute(1, 2, 0, 3).reshape(9, k * c).cast("float64")).cast("float32")
        view = points.reshape(-1, k, c).permute(1, 0, 2).reshape(1, k, -1, c)
        self._static_chain(view)
        return view

    def _static_view(self, w: Value) -> Operand:
        k, r, s, _ = w.shape
        view = w.reshape(k, r * s).permute(1, 0).reshape(r, s, k)
        self._static_chain(view)
        return self.operand(view)

    def _dense(self, v: Value) -> Operand:
        op = self.operand(v)
        return op if op.contiguous else self._copy(v)

    def _matmul(self, group: Group, made: dict[str, Buffer]) -> None:
        node = group.anchor
        a, b = node.inputs
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        flops = 2 * node.out.numel * k * len(group.anchors)
        batch = math.prod(node.out.shape[:-2])
        order = self._element_order(a.dtype)
        if not self.config.packs_weights:
            self._strided_matmul(group, made, flops, batch)
            return
        if b in self.static and math.prod(b.shape[:-2]) == 1:
            matrices = [x.inputs[1].reshape(k, n) for x in group.anchors]
            layout = self._format_layout(matrices[0])
            view = self._columns(matrices, stored=layout is not None)
            key = tuple(x.inputs[1] for x in group.anchors)
            weight, shared = self.packed_weight(key, view, layout or order), True
            left = self._rows(a, math.prod(a.shape[:-2]))
        else:
            shared = math.prod(b.shape[:-2]) == 1
            weight = self._pack(b if shared else b.expand(*node.out.shape[:-2], k, n), order)
            left = self._rows(
                a if math.prod(a.shape[:-2]) in (1, batch) and shared else a.expand(*node.out.shape[:-2], m, k), batch
            )
        self._gemm(group, made, left, weight, flops, batch, shared)

    def _strided_matmul(self, group: Group, made: dict[str, Buffer], flops: int, batch: int) -> None:
        """Add a product for a target that does not pack: the right operand is [batch or 1, N, K] with its own strides.
        A weight of two dims is stored with K last, or in the layout of its weight format."""
        node = group.anchor
        a, b = node.inputs
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        shared = math.prod(b.shape[:-2]) == 1
        rounded = False
        if b in self.static and shared:
            matrices = [x.inputs[1].reshape(k, n) for x in group.anchors]
            layout, key = self._format_layout(matrices[0]), tuple(x.inputs[1] for x in group.anchors)
            rows = 1 if a.dtype == dtypes.FLOAT8 else m * batch  # float8 products read the blocks as they are
            elements = self._reads_elements(matrices[0], layout, rows)
            view = self._columns(matrices, stored=not elements)
            if layout is not None and not elements:
                right = (
                    self.packed_weight(key, view, layout)
                    if rows <= (layout.max_rows or rows)
                    else self.unpacked_weight(key, view, layout, b.dtype, k)
                )
            else:
                view = view.reshape(1, n * len(group.anchors), k)
                self._static_chain(view)
                rounded = self._rounds(rows, a.dtype)
                right = self.packed_weight((key, TF32), view, TF32) if rounded else self.operand(view)
        else:
            full = b if shared else b.expand(*node.out.shape[:-2], k, n)
            op = self.operand(full)
            strides = _collapse(op, (1 if shared else batch, k, n))
            if strides is None:
                op = self._copy(full)
                strides = contiguous_strides((1 if shared else batch, k, n))
            right = Operand(op.buffer, (1 if shared else batch, n, k), (strides[0], strides[2], strides[1]), op.offset)
        whole = a if shared and math.prod(a.shape[:-2]) == batch else a.expand(*node.out.shape[:-2], m, k)
        left = self._rows(whole, batch)
        self._gemm(group, made, left, right, flops, batch, shared, rounded)

    def _gemm(
        self, group: Group, made: dict[str, Buffer], left: Operand, right: Operand, flops: int, batch: int,
        shared: bool, rounded: bool = False,
    ) -> None:  # fmt: skip
        """Add the kernel. If all matrices of the batch multiply one right operand, their rows become one matrix if
        the strides allow it. ``rounded``: the right operand is a weight of numbers that TF32 holds."""
        a, b = group.anchor.inputs
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        rows = _collapse(left, (1, batch * m, k)) if shared else None
        if rows is not None and (rows[1] or batch * m == 1):  # a row that is repeated stays a matrix of each batch
            left, m, batch = Operand(left.buffer, (1, batch * m, k), rows, left.offset), batch * m, 1
        strides = _collapse(left, (batch, m, k))
        assert strides is not None
        self._anchor(
            group, made, Gemm, [left, right], flops,
            batch=batch, m=m, n=n, k=k, lda=strides[1] if m > 1 else k, batch_stride=strides[0], shared=shared,
            dual=len(group.anchors) > 1, tf32=self._rounds(batch * m, a.dtype), rounded=rounded,
        )  # fmt: skip

    def _rows(self, a: Value, batch: int) -> Operand:
        """Return the left operand as [batch, M, K] with unit stride along K and one stride per batch; a copy if its
        own strides are others."""
        op = self.operand(a)
        m, k = a.shape[-2:]
        strides = _collapse(op, (batch, m, k))
        if strides is None or (k > 1 and strides[2] != 1) or (m > 1 and strides[1] == 0):
            op = self._copy(a)
            strides = contiguous_strides((batch, m, k))
        return Operand(op.buffer, (batch, m, k), strides, op.offset)

    def _pack(self, b: Value, order: str) -> Operand:
        """Return a right operand that is computed at run time, packed into panels by a separate kernel."""
        k, n = b.shape[-2:]
        batch, panel = math.prod(b.shape[:-2]), self.config.panel
        op = self.operand(b)
        strides = _collapse(op, (batch, k, n))
        if strides is None:
            op = self._copy(b)
            strides = contiguous_strides((batch, k, n))
        depth = ELEMENTS[order]
        tail = (-(-k // depth), panel, depth) if depth > 1 else (k, panel)
        source = Operand(op.buffer, (batch, k, n), strides, op.offset)
        return self._panels(source, (batch, -(-n // panel), *tail), b.node.sources)

    def _packed_filters(self, w: Value, groups: int, order: str) -> Operand:
        """Return filters [K, R, S, C / groups] that are computed at run time, packed like load-time values: as panels
        of a matrix whose rows are taps and channels."""
        k, r, s, c = w.shape
        dense, n, rows, panel = self._dense(w), k // groups, r * s * c, self.config.panel
        source = Operand(dense.buffer, (groups, rows, n), (n * rows, 1, rows), dense.offset)
        return self._panels(source, packed_spec(order, (groups, n, r * s, c), w.dtype, panel)[0], w.node.sources)

    def _panels(self, source: Operand, shape: tuple[int, ...], sources: tuple[str, ...]) -> Operand:
        """Return the panels of right operands [batch, k, n], which a kernel packs."""
        batch, k, n = source.shape
        out = Operand(self._buffer("arena", source.dtype, shape, "packed"), shape, contiguous_strides(shape))
        self._kernel(Pack(label="pack", inputs=(source,), outputs=(out,), batch=batch, k=k, n=n, sources=sources))
        return out

    def _attention(self, group: Group, made: dict[str, Buffer]) -> None:
        node = group.anchor
        fixed = []
        for i, v in enumerate(node.inputs):
            op = self.operand(v)
            fixed.append(op if i == 3 or op.strides[-1] == 1 or v.shape[-1] == 1 else self._copy(v))
        q, k = node.inputs[:2]
        flops = 4 * q.numel * k.shape[2]
        self._anchor(group, made, Attention, fixed, flops, **node.attrs)


def _collapse(op: Operand, shape: tuple[int, int, int]) -> tuple[int, ...] | None:
    """Return the strides of an operand seen as [batch, rows, columns]; None if its batch dims have no common stride."""
    return reshape_strides(op.shape, op.strides, shape)
