"""Data-dependent parts of a model: sizes, Python numbers, and control flow. The host runs all of them, in PyTorch.

A dimension that depends on data is a :class:`~.ir.DataSize`. A Python number that depends on data (``item``) is a 0-dim
tensor in the IR. An attribute refers to it as ``{"number": i}``: the number in input ``i`` of the node. These inputs
follow the tensors that the op takes. (A complex number is ``{"complex": [real, imaginary]}``.)

Two kinds of nodes are not ATen calls:

* arithmetic on such numbers, ``number.add``: the attribute ``args`` lists the operands, numbers and references to them;
* control flow, whose graphs are in ``OpNode.graphs`` and take inputs of the node:
  ``higher_order.cond`` (a predicate and the operands of the graphs ``true`` and ``false``) and
  ``higher_order.while_loop`` (operands of the graphs ``cond`` and ``body``; the first ``carried`` of them are replaced
  by the results of ``body`` as long as ``cond`` is true, and are the outputs).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

from ..support.errors import Reason
from .ir import OpNode


def _power(base: float, exponent: float) -> float:
    """Return ``base ** exponent``; an integer too large for any tensor raises before Python computes its digits."""
    if isinstance(exponent, int) and isinstance(base, int) and exponent * base.bit_length() > 2 * 64:
        raise OverflowError(f"{base} ** {exponent} does not fit 64 bits")
    result: float = base**exponent
    return result


NUMBER_OPS: dict[str, Callable[..., Any]] = {
    f"number.{name}": function
    for name, function in {
        **{
            f.__name__: f
            for f in (
                *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
                *(operator.neg, operator.eq, operator.ne, operator.lt, operator.le, operator.gt),
                *(operator.ge, operator.and_, operator.or_, math.ceil, math.floor, math.trunc, round, max, min, sum),
                *(float, int, math.sqrt),
            )
        },
        "pow": _power,
        "not": operator.not_,
        "ite": lambda condition, yes, no: yes if condition else no,
    }.items()
}
"""Arithmetic on Python numbers; the names are those of ``operator`` and ``math``, or ``torch.sym_*`` without prefix."""

CONTROL_FLOW = {"higher_order.cond": ("true", "false"), "higher_order.while_loop": ("cond", "body")}
"""Control flow -> the names of its graphs."""

ASSERTION = "aten._assert_scalar.default"
"""The op that checks a number. It has no result, and runs although no node reads it."""

_FIX = "use torch.where and fixed sizes to run it on the NPU"


def number_inputs(value: Any) -> Iterator[Any]:
    """Yield the positions of the inputs that attributes refer to as numbers."""
    if isinstance(value, dict):
        if set(value) == {"number"}:
            yield value["number"]
        else:
            for item in value.values():
                yield from number_inputs(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from number_inputs(item)


def data_dependence(node: OpNode) -> Reason | None:
    """Return why ``node`` must run on the host on every target, because of data-dependent values, or None."""
    detail = ""
    if node.op_type in CONTROL_FLOW:
        detail = "which graph runs, and how often, depends on data"
    elif node.op_type in NUMBER_OPS:
        detail = "computes with a Python number that depends on data"
    elif node.op_type in ("aten.item.default", "aten._local_scalar_dense.default"):
        detail = "makes a Python number from tensor data"
    elif any(not t.is_static for t in node.outputs):
        detail = "its shape depends on data"
    elif any(not t.is_static for t in node.inputs):
        detail = "the shape of its input depends on data"
    elif taken := [name for name, value in node.attrs.items() if any(True for _ in number_inputs(value))]:
        detail = f"its argument {taken[0]} depends on data"
    return Reason("data_dependent", detail, _FIX) if detail else None
