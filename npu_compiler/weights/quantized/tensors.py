"""Checked access to the tensors of quantised modules: every problem names the file and the tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...support.errors import WeightError
from ..files import TensorFiles

FLOATS = ("F16", "BF16", "F32")
_DAMAGED = "the file is damaged, or config.json belongs to another model; download both again"


class Tensors:
    """The tensors of a checkpoint. A module's tensors are named '<module>.<leaf>'; :attr:`used` collects those that
    were looked up."""

    def __init__(self, files: TensorFiles):
        self._files = files
        self._names = set(files.names())
        self.used: set[str] = set()

    def modules(self, leaf: str) -> list[str]:
        """Return the modules that have a tensor of this name."""
        end = f".{leaf}"
        return sorted(n.removesuffix(end) for n in self._names if n.endswith(end))

    def has(self, module: str, leaf: str) -> bool:
        """Return True if the module has this tensor."""
        return f"{module}.{leaf}" in self._names

    def dtype(self, module: str, leaf: str) -> str:
        """Return a tensor's dtype as the file spells it."""
        return self._files.header(f"{module}.{leaf}")[0]

    def shape(self, module: str, leaf: str, dtypes: Sequence[str], rank: int | None = None) -> tuple[int, ...]:
        """Return the shape of a tensor, all of whose dims are positive.

        Raises:
            WeightError: it is missing, or has another dtype or rank.
        """
        name = f"{module}.{leaf}"
        if name not in self._names:
            raise WeightError(f"{self._files.origin} lacks {name!r}, a part of a quantised matrix; {_DAMAGED}")
        dtype, shape = self._files.header(name)
        self.used.add(name)
        if dtype not in dtypes or (rank is not None and len(shape) != rank) or 0 in shape:
            wanted = " or ".join(dtypes) + ("" if rank is None else f" of {rank} dims")
            raise self.error(module, leaf, f"{wanted}, none of them 0")
        return shape

    def expect(self, module: str, leaf: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
        """Raise ``WeightError`` unless a tensor has this shape and one of these dtypes."""
        if self.shape(module, leaf, dtypes) != shape:
            raise self.error(module, leaf, f"{list(shape)}")

    def error(self, module: str, leaf: str, wanted: str) -> WeightError:
        """Return the error for a tensor that is not as ``wanted``."""
        dtype, shape = self._files.header(f"{module}.{leaf}")
        name = f"{module}.{leaf}"
        return WeightError(f"{self._files.origin}: tensor {name!r} is {dtype}{list(shape)}, not {wanted}; {_DAMAGED}")

    def raw(self, module: str, leaf: str) -> np.ndarray:
        """Return a tensor; numbers of 8-bit floating point types as their bytes."""
        return self._files.raw(f"{module}.{leaf}")

    def scales(self, module: str, leaf: str) -> np.ndarray:
        """Return a tensor of scales in float32. Raises ``WeightError`` if not all are finite."""
        found = self.raw(module, leaf).astype(np.float32)
        if not np.isfinite(found).all():
            raise self.error(module, leaf, "finite")
        return found

    def group(self, module: str, leaf: str, k: int, groups: int, said: int | None) -> int:
        """Return the columns of a group, given the groups of a row of ``k`` and the config's group size (-1: whole
        rows, None: not said). Raises ``WeightError`` unless they agree."""
        size = -(-k // groups)
        wanted = size if said is None else k if said == -1 else said
        if wanted < 1 or -(-k // wanted) != groups:
            raise self.error(module, leaf, f"of {k} columns in groups of {'a row' if said == -1 else wanted}")
        return min(wanted, k)

    def order(self, module: str, leaf: str, k: int, groups: int, group: int) -> np.ndarray | None:
        """Return the group of each of ``k`` columns, the tensor ``leaf``; None if groups are runs of columns, or if the
        module has no such tensor. Raises ``WeightError`` for a group that does not exist."""
        if not self.has(module, leaf):
            return None
        self.expect(module, leaf, (k,), ("I32", "I64"))
        order = self.raw(module, leaf)
        if (order == -1).all() or np.array_equal(order, np.arange(k) // group):
            return None
        if order.min() < 0 or order.max() >= groups:
            raise self.error(module, leaf, f"numbers of {groups} groups")
        return order

    def is_zero(self, name: str) -> bool:
        """Return True if all elements of a tensor are 0."""
        return not self._files.read(name).any()

    def others(self, used: Iterable[str]) -> set[str]:
        """Return the names that are not in ``used``."""
        return self._names - set(used)
