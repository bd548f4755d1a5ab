"""Casts, copies and other ops that do not change values."""

from __future__ import annotations

from ..graph.expr import const
from ..graph.graph import Value
from ..support import dtypes as dt
from ..support.errors import Reason, Unsupported
from .registry import FLOATS, INTS, Result, lowers
from .samples import UNARY, S, t

EVERY = (*FLOATS, *INTS)
VALUES = t(6, values=(-2.75, -1, 0, 0.3, 1, 100))
EIGHTHS = t(11, dtype="float32", values=(-2.75, 1.0625, 1.1875, -0.0, 0.3, 100, 448, 464, 0.015, 0.0009, 0.00293))
TARGETS = [S(VALUES, d) for d in ("float32", "float16", "bfloat16", "int64", "int32", "bool")] + [
    S(UNARY[1].args[0], "int8"),
    S(EIGHTHS, "float8_e4m3fn"),  # larger ones become NaN or 448 in PyTorch, depending on the CPU
    S(t(64, dtype="float8_e4m3fn", low=-448, high=448), "float32"),
]
_BY_KEYWORD = [*(S(s.args[0], dtype=s.args[1]) for s in TARGETS), S(t(3))]


@lowers(
    "aten.to.dtype",
    samples=[*TARGETS, S(t(2, 3), "float16", False, True)],
    dtypes=EVERY,
    result=Result.VIEW_IF_POSSIBLE,
)
@lowers(
    "aten.to.device",
    samples=[S(s.args[0], "cpu", s.args[1]) for s in TARGETS],
    dtypes=EVERY,
    result=Result.VIEW_IF_POSSIBLE,
)
@lowers("aten.to.dtype_layout", samples=_BY_KEYWORD, dtypes=EVERY, result=Result.VIEW_IF_POSSIBLE)
@lowers("aten._to_copy.default", samples=_BY_KEYWORD, dtypes=EVERY)
def to(self: Value, dtype: str | None = None) -> Value:
    """Another dtype; floats become integers by truncation."""
    return self if dtype is None else self.cast(dt.parse(dtype))


@lowers(
    "aten.to.other",
    "aten.type_as.default",
    samples=[S(VALUES, t(2, dtype=s.args[1])) for s in TARGETS],
    dtypes=EVERY,
    result=Result.VIEW_IF_POSSIBLE,
)
def type_as(self: Value, other: Value) -> Value:
    """The values in the dtype of ``other``."""
    return self.cast(other.dtype)


@lowers(
    "aten.copy.default",
    samples=(S(t(2, 3), t(2, 3, dtype="float32")), S(t(2, 3), t(3)), S(t(3), t(dtype="int64")), S(t(0, 2), t(2))),
    dtypes=EVERY,
)
def copy(self: Value, src: Value) -> Value:
    """src, broadcast to self's shape and cast to its dtype."""
    return src.cast(self.dtype).expand(*self.shape)


_ALIASES = ("alias", "conj", "detach", "lift", "lift_fresh", "positive", "real", "resolve_conj", "resolve_neg")


@lowers(*(f"aten.{n}.default" for n in _ALIASES), samples=UNARY, dtypes=FLOATS, result=Result.VIEW)
@lowers("aten.contiguous.default", samples=UNARY, dtypes=FLOATS, result=Result.SELF_IF_CONTIGUOUS)
@lowers("aten.clone.default", "aten.lift_fresh_copy.default", samples=UNARY, dtypes=FLOATS)
def same(self: Value) -> Value:
    """The values unchanged: copies, aliases and autograd bookkeeping."""
    return self


def refuse_training(name: str, train: bool | None, p: float) -> None:
    """Raise ``Unsupported`` for dropout that would drop something."""
    if train is not False and p != 0:
        raise Unsupported(
            Reason("training", f"{name} with train={train} and p={p} is random", "call model.eval() before capture")
        )


DROPOUT = (S(t(3, 5), 0.5, False), S(t(2, 3, layout="transposed"), 0.0, True), S(t(0, 3), 0.1, False))
DROPOUTS = tuple(f"aten.{n}.default" for n in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"))


@lowers(*DROPOUTS, samples=DROPOUT, result=Result.VIEW)
def dropout(input: Value, p: float, train: bool) -> Value:
    """The input; dropping in training mode is refused."""
    refuse_training("dropout", train, p)
    return input


@lowers("aten.native_dropout.default", samples=(*DROPOUT, S(t(4), 0.0, None)))
def native_dropout(input: Value, p: float, train: bool | None) -> tuple[Value, Value]:
    """The input and a mask of ones."""
    refuse_training("native_dropout", train, p)
    return input, input.graph.elementwise(input.shape, [], const(True, "bool"))


@lowers("aten._assert_tensor_metadata.default", samples=(S(t(2, 3)), S(t(2, 3), [2, 3]), S(t(0))))
def assert_tensor_metadata(
    a: Value, size: list[int] | None = None, stride: list[int] | None = None, dtype: str | None = None
) -> tuple[()]:
    """Nothing: shapes are static and checked at compile time."""
    return ()


@lowers(
    "aten._assert_async.default",
    samples=(S(t(dtype="bool", values=(True,))), S(t(1, dtype="int64", values=(2,))), S(t(1, 1, low=1))),
    dtypes=("float32",),
)
@lowers(
    "aten._assert_async.msg",
    samples=[S(t(dtype="bool", values=(True,)), m) for m in ("a", "b", "")],
    dtypes=("float32",),
)
def assert_async(self: Value, assert_msg: str = "") -> tuple[()]:
    """Nothing: assertions on values are dropped."""
    return ()
