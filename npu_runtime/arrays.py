"""Aligned host memory, reads of files into it, and the limits of this machine."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from npu_compiler.support import env
from npu_compiler.support.errors import BackendError

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
HUGE_PAGE = 2 << 20
KEPT = 32 << 20  # memory up to this size stays with the C library when it is freed: glibc's limit
_MAPPED = 128 << 10  # zeroed arrays from this size on are pages of their own
SLAB = 8 << 20  # bytes of a file that are read, checked and copied together


def widens(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Return whether ``target`` has every value of ``source`` and the same kind: a wider float for a float, a wider
    integer for an integer."""
    if source == ml_dtypes.bfloat16:
        return target in (np.dtype(np.float32), np.dtype(np.float64))
    kinds = source.kind + target.kind
    return kinds in ("ff", "ii", "uu", "ui") and np.can_cast(source, target, "safe")


def return_freed_memory() -> None:
    """Return memory that was freed to the system, after work with large temporaries. The C library keeps it otherwise;
    only glibc can be told."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@cache
def physical_memory() -> int:
    """Return the bytes of RAM, or a very large number if the system does not report them."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 2**62


def check_memory(nbytes: int, purpose: str) -> None:
    """Raise ``BackendError`` if ``nbytes`` exceed this machine's memory: otherwise the system would kill the process
    while it fills them. ``purpose`` begins the message."""
    if nbytes > physical_memory():
        raise BackendError(f"{purpose} needs {nbytes} bytes of memory, but this machine has {physical_memory()}")


def aligned_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an uninitialised C-contiguous array at a multiple of 64 bytes. Raises ``BackendError`` if memory is
    short."""
    return _aligned(shape, dtype, np.empty)


def passing_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an :func:`aligned_empty` array for short use, such as the result of a run. Its memory comes from the C
    library, because the system would clear new pages each time."""
    return _aligned(shape, dtype, np.empty, pages_from=KEPT)


def aligned_zeros(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """Return :func:`aligned_empty` filled with zeros; pages that are never written take no memory."""
    return _aligned(shape, dtype, _zeroed)


def _zeroed(size: int, dtype: type) -> np.ndarray:
    """Return zeroed bytes. The C library would take large ones from memory that was freed, and clear them."""
    return np.frombuffer(_anonymous(size), dtype) if size >= _MAPPED else np.zeros(size, dtype)


def _aligned(
    shape: Sequence[int], dtype: np.dtype[Any], allocate: Callable[..., np.ndarray], pages_from: int = HUGE_PAGE
) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    check_memory(size, f"an array of shape {list(shape)}")
    try:
        raw = _pages(size) if size >= pages_from else _at_multiple(allocate(size + ALIGNMENT, np.uint8), ALIGNMENT)
    except (MemoryError, OSError):
        raise BackendError(f"there is no memory for {size} bytes (shape {list(shape)}, dtype {dtype})") from None
    return raw[:size].view(dtype).reshape(tuple(shape))


def _at_multiple(raw: np.ndarray, align: int) -> np.ndarray:
    return raw[-raw.ctypes.data % align :]


def zeros(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """Return a read-only array of zeros that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))


def _anonymous(size: int) -> mmap.mmap:
    # Private, because shared memory (the default) has huge pages only if the administrator allows them for it.
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _pages(size: int) -> np.ndarray:
    """Return at least ``size`` bytes of zeroed memory at a multiple of a huge page, in huge pages if the system has
    them: streaming weights through 4 KB pages costs up to a third. What does not fill a huge page has ordinary pages,
    of which only those that are written take memory."""
    memory = _anonymous(size + HUGE_PAGE)
    raw = np.frombuffer(memory, np.uint8)
    aligned = _at_multiple(raw, HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: ordinary ones
            memory.madvise(mmap.MADV_HUGEPAGE, raw.size - aligned.size, size // HUGE_PAGE * HUGE_PAGE)
    return aligned


class Block:
    """One allocation for many 64-byte aligned arrays, so that small tensors share huge pages."""

    def __init__(self, size: int):
        self._memory, self._used = aligned_empty((size,), np.dtype(np.uint8)), 0

    def take(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray | None:
        """Return an uninitialised array, or None if the block has no room for it."""
        size = math.prod(shape) * dtype.itemsize
        start, end = self._used, self._used + size
        if end > self._memory.size:
            return None
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        return self._memory[start:end].view(dtype).reshape(tuple(shape))


SlabCheck = Callable[[int, np.ndarray], None]  # takes the number of a slab and its bytes


def read_file(descriptor: int, begin: int, nbytes: int, check: SlabCheck) -> np.ndarray:
    """Return uint8 [nbytes] from file offset ``begin``, read as by :func:`read_slabs`."""
    block = aligned_empty((nbytes,), np.dtype(np.uint8))
    read_slabs(descriptor, begin, block, check)
    return block


def read_slabs(descriptor: int, begin: int, block: np.ndarray, check: SlabCheck) -> None:
    """Fill ``block``, uint8, from file offset ``begin``. Several threads read slabs of it, because one thread is slower
    than memory. ``check`` is called with each slab in the thread that read it; its exceptions are raised here."""

    def read(number: int) -> None:
        slab = block[number * SLAB : (number + 1) * SLAB]
        read_into(descriptor, begin + number * SLAB, slab)
        check(number, slab)

    with ThreadPoolExecutor(min(8, env.usable_cpus())) as pool:
        list(pool.map(read, range(-(-block.size // SLAB))))


def read_into(descriptor: int, begin: int, target: np.ndarray) -> None:
    """Fill ``target``, uint8, from file offset ``begin``. Raises ``OSError``."""
    done = 0
    while done < target.size:
        count = os.preadv(descriptor, [target[done:].data], begin + done)
        if count == 0:
            raise OSError("the file became shorter while it was read")
        done += count
