"""Lists of tensors among the arguments of a node. Its inputs are flat, so attributes hold the number of tensors of each
list and which elements of a list are None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SIZES, MASKS = "_tensor_list_sizes", "_tensor_list_none_masks"
ENCODING = (SIZES, MASKS)


def list_attrs(lists: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the attributes that describe ``lists``, in whose order the inputs hold the elements that are not None."""
    masks = [[x is None for x in elements] for elements in lists]
    sizes = [mask.count(False) for mask in masks]
    return ({SIZES: sizes} if lists else {}) | ({MASKS: masks} if any(map(any, masks)) else {})


def complete_masks(sizes: Sequence[int], masks: Sequence[Sequence[bool]]) -> list[list[bool]]:
    """Return one mask for each list, or none at all if no element is None.

    Some documents have masks only for lists with None. Such a mask belongs to a list with as many tensors. Raises
    ``ValueError`` if the masks do not tell which lists they belong to.
    """
    if not any(map(any, masks)):
        return []
    counts = [list(mask).count(False) for mask in masks]
    first = _places(sizes, counts)
    last = [len(sizes) - 1 - at for at in _places(sizes[::-1], counts[::-1])][::-1]
    if len(first) < len(masks) or first != last:
        found = "no list" if len(first) < len(masks) else "several lists"
        raise ValueError(f"a mask fits {found}; the lists have {list(sizes)} tensors: write one mask for each list")
    made = [[False] * size for size in sizes]
    for mask, at in zip(masks, first, strict=True):
        made[at] = list(mask)
    return made


def _places(sizes: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return the first positions of ``sizes`` at which ``counts`` stand, in order; fewer if they do not stand there."""
    found: list[int] = []
    for at, size in enumerate(sizes):
        if len(found) < len(counts) and size == counts[len(found)]:
            found.append(at)
    return found


class TensorLists:
    """Hands out the lists of a node in order; :meth:`take` returns which elements of the next one are None."""

    def __init__(self, attrs: Mapping[str, Any]):
        self._sizes = list(attrs.get(SIZES) or ())
        self._masks = complete_masks(self._sizes, attrs.get(MASKS) or ())

    def __bool__(self) -> bool:
        """Whether the attributes describe another list."""
        return bool(self._sizes)

    def take(self, left: int) -> list[bool]:
        """Return the mask of the next list, which has the ``left`` remaining inputs if the attributes do not say."""
        size = self._sizes.pop(0) if self._sizes else left
        return self._masks.pop(0) if self._masks else [False] * size
