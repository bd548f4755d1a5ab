"""Matrix products. Products of half types accumulate, and add their bias, in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from ..graph.expr import maximum
from ..graph.graph import Value
from ..support import dtypes as dt
from .activations import gelu
from .common import scaled
from .registry import ALL, Result, Scalar, lowers
from .samples import S, t
from .slicing import diagonal


def product(a: Value, b: Value) -> Value:
    """Compute torch.matmul of any ranks: a vector is a matrix of one row or column, leading dims broadcast."""
    common = dt.promote(a.dtype, b.dtype)
    a, b = a.cast(common), b.cast(common)
    rows = a if a.rank > 1 else a.reshape(1, -1)
    columns = b if b.rank > 1 else b.reshape(-1, 1)
    y = rows.matmul(columns)
    shape = y.shape[:-2] + (y.shape[-2:-1] if a.rank > 1 else ()) + (y.shape[-1:] if b.rank > 1 else ())
    return y.reshape(*shape)


def blend(base: Value, y: Value, beta: Scalar, alpha: Scalar) -> Value:
    """Return beta * base + alpha * y; with beta 0 the base is not read, so its NaN do not count. y comes first, as in a
    linear layer with a bias."""
    if beta == 0:
        return scaled(y, alpha)
    return y.graph.pointwise(lambda p, b: scaled(p, alpha) + scaled(b, beta), y, base)


PAIRS = (
    S(t(3, 4), t(4, 5)),
    S(t(4), t(4)),
    S(t(4), t(4, 5)),
    S(t(3, 4), t(4)),
    S(t(2, 3, 4), t(4, 5)),
    S(t(2, 3, 4), t(4)),
    S(t(4), t(2, 4, 5)),
    S(t(3, 4), t(2, 4, 5)),
    S(t(2, 3, 4), t(2, 4, 5)),
    S(t(5, 1, 3, 4), t(2, 4, 5)),
    S(t(2, 3, 4, layout="transposed"), t(2, 4, 5, layout="transposed")),
    S(t(0, 4), t(4, 5)),
    S(t(3, 0), t(0, 5)),
    S(t(33, 70), t(70, 17)),
)
SQUARE = (
    S(t(3, 4), t(4, 5)),
    S(t(3, 4, layout="transposed"), t(4, 5, layout="transposed")),
    S(t(0, 4), t(4, 5)),
    S(t(3, 0), t(0, 5)),
)
BATCHED = (
    S(t(2, 3, 4), t(2, 4, 5)),
    S(t(2, 3, 4, layout="transposed"), t(2, 4, 5, layout="transposed")),
    S(t(0, 3, 4), t(0, 4, 5)),
)
VECTORS = (S(t(4), t(4)), S(t(9, layout="strided"), t(9)), S(t(0), t(0)))


@lowers("aten.matmul.default", "aten.linalg_matmul.default", samples=PAIRS, dtypes=ALL)
def matmul(self: Value, other: Value) -> Value:
    """Matrix product of tensors of any rank, broadcasting leading dims."""
    return product(self, other)


@lowers("aten.mm.default", samples=SQUARE, dtypes=ALL)
@lowers("aten.bmm.default", samples=BATCHED, dtypes=ALL)
def mm(self: Value, mat2: Value) -> Value:
    """Matrix product [M, K] @ [K, N]."""
    return product(self, mat2)


@lowers(
    "aten.mv.default", samples=(S(t(3, 4), t(4)), S(t(3, 4, layout="transposed"), t(4)), S(t(0, 4), t(4))), dtypes=ALL
)
def mv(self: Value, vec: Value) -> Value:
    """Matrix times vector, [M, K] @ [K]."""
    return product(self, vec)


@lowers("aten.dot.default", samples=VECTORS, dtypes=ALL)
def dot(self: Value, tensor: Value) -> Value:
    """Sum of products of two vectors."""
    return product(self, tensor)


@lowers("aten.vdot.default", samples=VECTORS, dtypes=ALL)
def vdot(self: Value, other: Value) -> Value:
    """Sum of products of two real vectors."""
    return product(self, other)


@lowers(
    "aten.outer.default",
    "aten.ger.default",
    samples=(S(t(3), t(4)), S(t(5, layout="strided"), t(2)), S(t(0), t(3))),
    dtypes=ALL,
)
def outer(self: Value, vec2: Value) -> Value:
    """All products of two vectors, [N] and [M] -> [N, M]."""
    return self.reshape(-1, 1) * vec2


@lowers(
    "aten.inner.default", samples=(S(t(4), t(4)), S(t(3, 4), t(4)), S(t(2, 3, 4), t(5, 4)), S(t(), t(3))), dtypes=ALL
)
def inner(self: Value, other: Value) -> Value:
    """Contraction of the last dims."""
    if not (self.rank and other.rank):
        return self * other
    a, b = (x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in (self, other))
    return product(a, b.permute(1, 0)).reshape(*self.shape[:-1], *other.shape[:-1])


LINEAR = (
    S(t(3, 4), t(5, 4), t(5)),
    S(t(2, 3, 4), t(5, 4)),
    S(t(4), t(5, 4), t(5)),
    S(t(2, 3, 4, layout="transposed"), t(5, 4, layout="transposed"), t(5)),
    S(t(0, 4), t(5, 4), t(5)),
    S(t(3, 4), t(4)),
    S(t(17, 130), t(33, 130), t(33)),
)


@lowers("aten.linear.default", samples=LINEAR)
def linear(input: Value, weight: Value, bias: Value | None = None) -> Value:
    """input @ weight.T + bias over the last dim."""
    w = weight.cast(input.dtype)
    y = product(input, w.permute(1, 0) if w.rank == 2 else w)
    return y if bias is None else y + bias


ADD = [
    S(t(3, 5), *SQUARE[0].args),
    S(t(5), *SQUARE[1].args, beta=2, alpha=3),
    S(t(3, 1), *SQUARE[0].args, beta=0),
    S(t(), *SQUARE[3].args, alpha=-1),
]
HALF = [S(t(5, dtype="float32"), *(t(*a.shape, dtype="float32") for a in SQUARE[0].args), beta=0.5, alpha=1.5)]


@lowers("aten.addmm.default", samples=ADD + HALF, dtypes=ALL)
def addmm(self: Value, mat1: Value, mat2: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    """beta * self + alpha * mat1 @ mat2."""
    return blend(self, product(mat1, mat2), beta, alpha)


@lowers(
    "aten._addmm_activation.default",
    samples=[
        S(t(5), *SQUARE[0].args),
        S(t(5), *SQUARE[0].args, use_gelu=True),
        S(t(5), *SQUARE[1].args, beta=2, alpha=-1),
    ],
)
def addmm_activation(
    self: Value, mat1: Value, mat2: Value, *, beta: Scalar = 1, alpha: Scalar = 1, use_gelu: bool = False
) -> Value:
    """addmm followed by ReLU, or by the exact GELU, as on PyTorch's CPU. Its CUDA kernel approximates it with tanh."""
    y = addmm(self, mat1, mat2, beta=beta, alpha=alpha)
    return y.graph.pointwise(gelu if use_gelu else (lambda x: maximum(x, 0)), y)


@lowers(
    "aten.addmv.default",
    samples=[S(t(3), t(3, 4), t(4)), S(t(), t(3, 4), t(4), beta=2, alpha=3), S(t(3), t(3, 4), t(4), beta=0)],
    dtypes=ALL,
)
def addmv(self: Value, mat: Value, vec: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    """beta * self + alpha * mat @ vec."""
    return blend(self, product(mat, vec), beta, alpha)


@lowers(
    "aten.addr.default",
    samples=[S(t(3, 4), t(3), t(4)), S(t(4), t(3), t(4), beta=2, alpha=3), S(t(3, 4), t(3), t(4), beta=0)],
    dtypes=ALL,
)
def addr(self: Value, vec1: Value, vec2: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    """beta * self + alpha * the outer product of two vectors."""
    return blend(self, vec1.reshape(-1, 1) * vec2, beta, alpha)


ADD_BATCHED = [
    S(t(2, 3, 5), *BATCHED[0].args),
    S(t(3, 5), *BATCHED[1].args, beta=2, alpha=-1),
    S(t(5), *BATCHED[0].args, beta=0),
]


@lowers("aten.baddbmm.default", samples=ADD_BATCHED, dtypes=ALL)
def baddbmm(self: Value, batch1: Value, batch2: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    """beta * self + alpha * batch1 @ batch2, [B, M, K] @ [B, K, N]."""
    return blend(self, product(batch1, batch2), beta, alpha)


@lowers("aten.addbmm.default", samples=[S(t(3, 5), *s.args[1:], **dict(s.kwargs)) for s in ADD_BATCHED], dtypes=ALL)
def addbmm(self: Value, batch1: Value, batch2: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    """beta * self + alpha * the sum of all products."""
    y = product(batch1, batch2)
    return blend(self, y.sum([0]).reshape(*y.shape[1:]), beta, alpha)


# -- einsum -----------------------------------------------------------------------------------------------------------
Labels = tuple[str, ...]


def parse(equation: str, ranks: Sequence[int]) -> tuple[list[Labels], Labels]:
    """Return the labels of every operand and of the result; dims of an ellipsis are '.1', '.2' ... from the right."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise ValueError(f"einsum {equation!r} names {len(terms)} operands, {len(ranks)} given")
    widths = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]

    def labels(term: str, width: int) -> Labels:
        head, dots, tail = term.partition("...")
        if width < 0 or (width and not dots):
            raise ValueError(f"einsum term {term!r} does not fit its operand")
        return (*head, *(f".{width - i}" for i in range(width)), *tail)

    parsed = [labels(term, width) for term, width in zip(terms, widths, strict=True)]
    most = max(width if "..." in term else 0 for term, width in zip(terms, widths, strict=True))
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        right = "..." + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    return parsed, labels(right, most if "..." in right else 0)


def distinct(x: Value, labels: Labels) -> tuple[Value, Labels]:
    """Take the diagonal of dims with the same label, which come last."""
    for name in dict.fromkeys(labels):
        while labels.count(name) > 1:
            a, b = [i for i, other in enumerate(labels) if other == name][:2]
            if x.shape[a] != x.shape[b]:
                raise ValueError(f"sizes {x.shape[a]} and {x.shape[b]} of one label")
            x = diagonal(x, 0, a, b)
            labels = (*(other for i, other in enumerate(labels) if i not in (a, b)), name)
    return x, labels


def sum_out(x: Value, labels: Labels, keep: set[str]) -> tuple[Value, Labels]:
    """Sum over the labels that ``keep`` does not have."""
    axes = [i for i, name in enumerate(labels) if name not in keep]
    left = tuple(name for name in labels if name in keep)
    return (x.sum(axes).reshape(*(n for i, n in enumerate(x.shape) if i not in axes)) if axes else x), left


def contract(a: tuple[Value, Labels], b: tuple[Value, Labels], keep: set[str]) -> tuple[Value, Labels]:
    """Multiply two operands and sum over the labels that neither the result nor a later operand has."""
    (x, lx), (y, ly) = sum_out(*a, keep | set(b[1])), sum_out(*b, keep | set(a[1]))
    batch = [name for name in lx if name in ly and name in keep]
    inside = [name for name in lx if name in ly and name not in keep]
    rows, columns = ([name for name in mine if name not in other] for mine, other in ((lx, ly), (ly, lx)))
    size = {
        name: max(dict(zip(lx, x.shape, strict=True)).get(name, 1), dict(zip(ly, y.shape, strict=True)).get(name, 1))
        for name in (*lx, *ly)
    }

    def arrange(v: Value, labels: Labels, groups: Sequence[list[str]]) -> Value:
        order = [name for group in groups for name in group]
        v = v.permute(*(labels.index(name) for name in order)).expand(*(size[name] for name in order))
        return v.reshape(*(math.prod(size[name] for name in group) for group in groups))

    out = product(arrange(x, lx, (batch, rows, inside)), arrange(y, ly, (batch, inside, columns)))
    labels = (*batch, *rows, *columns)
    return out.reshape(*(size[name] for name in labels)), labels


EINSUM = (
    S("ij,jk->ik", [t(3, 4), t(4, 5)]),
    S("bhqd,bhkd->bhqk", [t(2, 3, 4, 5), t(2, 3, 6, 5)]),
    S("bij,bjk", [t(2, 3, 4), t(2, 4, 5)]),
    S("...ij,...jk->...ik", [t(5, 1, 3, 4), t(2, 4, 5)]),
    S("i,j->ij", [t(3), t(4)]),
    S("ij,ij->", [t(3, 4), t(3, 4)]),
    S("ij->ji", [t(3, 4)]),
    S("ii->i", [t(3, 3)]),
    S("iji,k->jk", [t(3, 4, 3), t(2)]),
    S("ij,kj->ki", [t(3, 4, layout="transposed"), t(5, 4)]),
    S("abc,cd,de->abe", [t(2, 3, 4), t(4, 5), t(5, 2)]),
    S("b i j , b j -> b i", [t(2, 3, 4), t(2, 4)]),
    S("ij,jk->k", [t(3, 4), t(4, 5)]),
    S("...d,d->...", [t(2, 3, 4), t(4)]),
)


@lowers("aten.einsum.default", samples=EINSUM, result=Result.VIEW_IF_POSSIBLE)  # of one tensor, if nothing is summed
def einsum(equation: str, tensors: list[Value], *, path: list[int] | None = None) -> Value:
    """Einstein summation, evaluated from left to right; ``path`` changes only the order of rounding."""
    terms, result = parse(equation, [x.rank for x in tensors])
    queue = [distinct(x, labels) for x, labels in zip(tensors, terms, strict=True)]
    while len(queue) > 1:
        a, b, *rest = queue
        queue = [contract(a, b, {*result, *(name for _, labels in rest for name in labels)}), *rest]
    value, labels = sum_out(*queue[0], set(result))
    return value.permute(*(labels.index(name) for name in result))


@lowers(
    "aten.tensordot.default",
    samples=(S(t(2, 3, 4), t(4, 3, 5), [1, 2], [1, 0]), S(t(3, 4), t(4, 5), [-1], [0]), S(t(2), t(3), [], [])),
)
def tensordot(self: Value, other: Value, dims_self: list[int], dims_other: list[int]) -> Value:
    """Contraction of the named dims, pairwise."""
    mine = [f"a{i}" for i in range(self.rank)]
    theirs = [f"b{i}" for i in range(other.rank)]
    for i, j in zip(dims_self, dims_other, strict=True):
        theirs[j] = mine[i]
    keep = set(mine) ^ set(theirs)
    return contract((self, tuple(mine)), (other, tuple(theirs)), keep)[0]


@lowers(
    "aten.linalg_multi_dot.default",
    samples=[
        S([t(2, 3), t(3, 4)]),
        S([t(2, 3), t(3, 4), t(4, 5)]),
        S([t(2, 3), t(3, 2), t(2, 4), t(4, 1)]),
        S([t(3), t(3, 4), t(4)]),
    ],
)
def multi_dot(tensors: list[Value]) -> Value:
    """The product of several matrices, in the order of fewest multiplications.

    Of equal orders, from left to right. Products are rounded to the matrices' dtype.
    """
    shapes = [x.shape for x in tensors]
    rows = [1 if len(shapes[0]) == 1 else shapes[0][0], *(s[0] for s in shapes[1:])]
    sizes = [*rows, 1 if len(shapes[-1]) == 1 else shapes[-1][1]]  # of matrix i: sizes[i] x sizes[i + 1]

    @cache
    def best(first: int, end: int) -> tuple[int, int]:
        """Return the multiplications of matrices first .. end - 1, and where the last one divides them."""
        if end - first == 1:
            return 0, end
        cost, at = min(
            (best(first, at)[0] + best(at, end)[0] + sizes[first] * sizes[at] * sizes[end], -at)
            for at in range(first + 1, end)
        )
        return cost, -at

    def multiplied(first: int, end: int) -> Value:
        at = best(first, end)[1]
        if end - first == 1:
            return tensors[first]
        return product(multiplied(first, at), multiplied(at, end)).cast(tensors[0].dtype)

    return multiplied(0, len(tensors))
