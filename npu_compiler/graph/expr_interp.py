"""Scalar expressions in numpy: their reference semantics."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..support import dtypes
from .expr import Expr, last_uses, render, walk
from .scalar_ops import SCALAR_OPS


def evaluate(
    e: Expr, domain: Sequence[int], arrays: Sequence[np.ndarray], extra: dict[Expr, np.ndarray] | None = None
) -> np.ndarray:
    """Compute ``e`` over the whole iteration domain, in the dtypes that the expression states.

    ``arrays`` are the operands. ``extra`` has values of leaves, such as stages and accumulators, that broadcast to the
    domain. Loads are clipped; a load out of range marks its elements, and a ``where`` drops the marks of the branch not
    taken. Raises ``IndexError`` if a marked element reaches the result. Intermediate results are freed after their last
    use.
    """
    if 0 in domain:
        return np.empty(tuple(domain), dtypes.numpy_dtype(e.dtype))
    val: dict[Expr, Any] = dict(extra or {})
    outside: dict[Expr, Any] = {}  # bool arrays that mark elements made from an out-of-range load
    done = last_uses(e)
    with np.errstate(all="ignore"):
        for x in walk(e):
            if x in val:
                continue
            dt = dtypes.numpy_dtype(x.dtype)
            marks = [outside.get(a, False) for a in x.args]
            if x.op == "const":
                val[x] = np.array(x.value).astype(dt)
            elif x.op == "index":
                along = [n if d == x.value else 1 for d, n in enumerate(domain)]
                val[x] = np.arange(domain[x.value], dtype=np.int64).reshape(along)
            elif x.op == "load":
                val[x] = _plain_load(arrays[x.value], x.args, domain)
                if val[x] is None:
                    val[x], mark = _clipped_load(arrays[x.value], [val[a] for a in x.args])
                    marks.append(mark)
            elif x.op == "cast":
                val[x] = np.asarray(val[x.args[0]]).astype(dt, copy=False)
            else:
                val[x] = np.asarray(SCALAR_OPS[x.op].numpy(*(val[a] for a in x.args))).astype(dt, copy=False)
            if x.op == "where":
                marks = [marks[0], np.where(val[x.args[0]], marks[1], marks[2])]
            if any(np.any(m) for m in marks):
                outside[x] = functools.reduce(np.logical_or, marks)
            for a in done.get(x, ()):
                val.pop(a, None)
                outside.pop(a, None)
    if e in outside:
        raise IndexError(f"index out of range in {render(e, 400)}")
    return np.broadcast_to(val[e], tuple(domain)).astype(dtypes.numpy_dtype(e.dtype))


def _plain_load(arr: np.ndarray, idx: Sequence[Expr], domain: Sequence[int]) -> np.ndarray | None:
    """Return the load as a view if each index is a constant or a whole dim of the domain, none used twice."""
    dims = [i.value for i in idx if i.op == "index"]
    if len(set(dims)) < len(dims):
        return None
    for i, n in zip(idx, arr.shape, strict=True):
        if not (domain[i.value] == n if i.op == "index" else i.op == "const" and 0 <= i.value < n):
            return None
    view = arr[(*(i.value if i.op == "const" else slice(None) for i in idx), ...)]
    view = view.transpose(sorted(range(len(dims)), key=lambda d: dims[d]))
    return view[tuple(slice(None) if d in dims else None for d in range(len(domain)))]


def _clipped_load(arr: np.ndarray, idx: list[Any]) -> tuple[Any, Any]:
    """Return the elements at ``idx`` and a mask of those out of range, which hold some other element or 0."""
    if not idx:
        return arr[()], False
    outside = functools.reduce(np.logical_or, [(i < 0) | (i >= n) for i, n in zip(idx, arr.shape, strict=True)])
    if not np.any(outside):
        return arr[tuple(idx)], False
    if not arr.size:
        return np.zeros(np.broadcast_shapes(*(np.shape(i) for i in idx)), arr.dtype), outside
    return arr[tuple(np.clip(i, 0, n - 1) for i, n in zip(idx, arr.shape, strict=True))], outside


def most_held(e: Expr) -> int:
    """Return how many intermediate results :func:`evaluate` holds at most at a time; constants and indices are free."""
    done, held, most = last_uses(e), 0, 0
    for x in walk(e):
        held += x.op not in ("const", "index")
        most = max(most, held)
        held -= sum(a.op not in ("const", "index") for a in done.get(x, ()))
    return most
