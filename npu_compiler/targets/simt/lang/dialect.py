"""The vocabulary of the SIMT kernels, and how a target defines it.

Kernels are C++ templates in ``kernels/*.h`` over this vocabulary; ``kernels/common.h`` defines further functions in
terms of it. A dialect's ``prelude`` defines:

types       ``f16 bf16 bool8 int8_t uint8_t int16_t int32_t int64_t float`` (storage), ``double`` if the target has it;
            ``uint``, ``uint4`` (16 bytes, members x y z w)
qualifiers  ``DEVICE`` before pointers to device memory, ``SMEM`` before pointers to shared memory, ``THREAD`` before
            references to a thread's own variables, ``INLINE`` before helper functions, ``CONSTANT`` before tables,
            ``CONSTANTS`` before members that are known at compile time; ``COHERENT`` before pointers to device memory
            that other workgroups of the launch write, only with :attr:`Dialect.arrival_counters`
conversion  ``float to_f32(f16)``, ``to_f32(bf16)``, ``f16 to_f16(float)``, ``bf16 to_bf16(float)``; with the macro
            ``HAS_E4M3`` also ``float f32_of_e4m3(uint)`` and ``uint e4m3_of_f32(float)``, see ``common.h``
subgroup    32 lanes (a warp): ``T subgroup_xor(T, int)``, the value of lane ^ mask (float, int); ``float
            subgroup_sum(float)``, in an order that is always the same; ``void subgroup_barrier()``
workgroup   ``void barrier()``: all threads of a workgroup, shared memory ordered
grid        ``int grid_barrier(DEVICE int* state, int number, int count, bool waits)``, called by one thread of each of
            ``count`` workgroups, after a barrier. Returns 0: exit; 1: process your own share; 2: also process the
            shares marked in ``state`` (bit number % 32 of word 1 + number / 32), and clear these bits. Writes made by
            any of the workgroups before the barrier are visible on 1 and 2. A workgroup that does not wait has no
            share. ``state`` is zero at first and belongs to these barriers; only with :attr:`Dialect.grid_barrier`
arrival     ``bool is_last(DEVICE int* counter, int count)``, called by one thread of each of ``count`` workgroups
            between two ``device_barrier()``: whether this workgroup is the last one, which then can read what the
            others wrote to ``COHERENT`` memory. ``counter`` is zero at first and belongs to these calls.
            ``device_barrier()`` is a ``barrier()`` that also orders device memory; only with
            :attr:`Dialect.arrival_counters`
report      ``set_flag(DEVICE int*)``: sets it to 1; any number of threads may call it at once
atomics     on device memory, in no order with other accesses of a kernel: ``int atomic_load(DEVICE int*)``,
            ``void atomic_max(DEVICE int*, int)``, ``void atomic_add(DEVICE T*, T)`` for int and int64_t. An addition to
            int64_t may consist of two, so that only the result of all additions is meaningful
bits        ``float f32_of_bits(uint)``, ``uint bits_of_f32(float)``
bytes       ``uint byte_permute(uint low, uint high, uint which)``: byte n of the result is the one of the eight in
            (low, high) that the low three bits of nibble n of ``which`` select; bit 3 of each of the four nibbles is 0
            ``uint pair_subtract(uint a, uint b)``: the difference of two pairs of bfloat16, if it is exact.
            ``uint pair_max_magnitude(uint a, uint b)``: the larger magnitudes of two pairs of bfloat16, of which ``a``
            is positive; only with :attr:`Dialect.fragment_access`.
            ``uint pair_of_e4m3(uint)``: two e4m3 numbers, 16 bits apart, as bfloat16;
            ``uint2 halves_of_e4m3(uint)``: four e4m3 numbers as pairs of float16;
            ``uint masked_or(uint x, uint mask, uint rest)``: (x & mask) | rest
loads       ``uint4 load16(DEVICE const void*)``; ``stream16``, ``uint2 stream8`` and ``uint stream4`` for data that is
            read once and written by no kernel; ``await_load(uint)`` waits until a loaded value has arrived, and may be
            empty
launch      programmatic dependent launch: ``pdl_launch_dependents()`` lets the next kernel start, ``pdl_wait()`` waits
            until what earlier kernels wrote is visible (weights may be read before). Both may be empty.
            ``prefetch(DEVICE const void* p, int bytes, int tid)``, called by all threads of a workgroup, loads data
            into a cache; only with :attr:`Dialect.prefetches`
copies      ``copy_async16(SMEM void*, DEVICE const void*, bool valid)`` (zeros if not valid), ``copy_async_commit()``,
            ``copy_async_wait<N>()``: waits for all but the last N commits. If copies block, these are a plain copy and
            two empty functions.
matrix      ``FragA<T>``, ``FragB<T>``, ``FragC``, ``frag_load_a/b(frag, SMEM const T* p, int ld, int lane)`` of
            [M, K] and [N, K] windows, ``frag_zero``, ``frag_mma(c, a, b)``, ``frag_store(SMEM float* p, int ld, c,
            lane)``; sizes in :attr:`Dialect.matrix`
fragments   access to elements of fragments, for kernels that use the result of one product in the next:
            ``frag_row(lane, i)`` and ``frag_column(lane, i)`` of result i of four (0 1, 2 3 in one row each),
            ``frag_row_max``, ``frag_row_sum`` over the lanes of a row, ``frag_a_from_c(a, left, right)``,
            ``frag_load_b2`` (two neighbours along N), ``frag_load_transposed`` (two, from memory that is [K, N]),
            ``m_exp2_fast``; ``frag_a_from(a, x0, x1, x2, x3, lane)`` and ``frag_b_from(b, x0, x1, lane)``: lane 4 r + c
            provides pairs 2 c (x0, x1) and 2 c + 8 of rows r (x0, x2) and r + 8 of A, pairs 2 c and 2 c + 8 of row r of
            B; ``frag_b_transposed(b, c, lane)``: B from the transposed results; ``uint transpose_8x8(uint)``: lane
            4 r + c provides pair 2 c of row r of a matrix, and gets that of its transpose; ``pack_pair(low, high,
            T*)``: two floats as a pair; only with :attr:`Dialect.fragment_access`
fast        functions such as ``m_sigmoid_fast(float)`` with errors far below half precision; those named in
            :attr:`Dialect.fast`
maths       ``m_exp`` and so on for each scalar op that is not an operator, on float (and double); ``m_log2_rough`` only
            with the macro ``HAS_ROUGH_LOG2``, otherwise it is ``m_log2``

The entry line of a kernel declares ``const int workgroup, tid, lane, subgroup``: the indices of the workgroup, of the
thread in the workgroup, of the lane in the subgroup, and of the subgroup in the workgroup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ....schedule.kernel import K, Kernel
from .device import GPU
from .emission import Emission
from .headers import included, pasted

KERNELS = Path(__file__).parents[1] / "kernels"
SUBGROUP = 32


class Param(NamedTuple):
    """A pointer parameter of a kernel. ``writable``: this kernel stores through it. ``constant``: no kernel writes its
    memory. ``coherent``: workgroups read what others of the launch wrote."""

    ctype: str
    name: str
    writable: bool
    constant: bool
    coherent: bool = False


class Array(NamedTuple):
    """An array of ``length`` elements in shared memory, 16-byte aligned. ``itemsize``: bytes of an element."""

    ctype: str
    name: str
    length: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """The size in bytes, rounded up to a multiple of 16."""
        return -(-self.length * self.itemsize // 16) * 16


class Special(NamedTuple):
    """A target's own function for the kernels of one class that it ``supports``.

    ``column_tiles(kernel, dialect)``: the number of tiles along the columns of a product; None: the function cannot
    compute its part of a row norm. :func:`special` makes these with checked types.
    """

    kernel: type[Kernel]
    supports: Callable[[Any, Dialect], bool]
    emit: Callable[[Any, Dialect], Emission]
    column_tiles: Callable[[Any, Dialect], int] | None


def special(
    kernel: type[K],
    supports: Callable[[K, Dialect], bool],
    emit: Callable[[K, Dialect], Emission],
    column_tiles: Callable[[K, Dialect], int] | None = None,
) -> Special:
    """Return the :class:`Special` for kernels of class ``kernel``, whose callables take kernels of that class."""
    return Special(kernel, supports, emit, column_tiles)


def _no_clusters(head: str, cluster: int) -> str:
    raise NotImplementedError(f"this target has no clusters of {cluster} workgroups")


@dataclass(frozen=True)
class Dialect:
    """How a target defines the vocabulary.

    ``name``: the target's. ``prelude``: the text of the definitions. ``entry(name, params, threads, resident)``: the
    opening of a kernel up to ``{``, and its first lines. Workgroups have ``threads`` threads, and ``resident`` of them
    should be resident on a compute unit (0: any number). ``shared(arrays)``: lines that declare shared memory, and the
    bytes to request at launch. ``device``: the GPU for which kernels choose their sizes. ``matrix``: (M, N, K) of the
    matrix unit, or () if there is none. ``matrix_types``: IR dtypes of its operands. ``matrix_tf32``: (M, N, K) for
    operands of float32 that are rounded to TF32, or (). ``stages``: of a ring buffer in shared memory. ``max_params``:
    the most pointers that a kernel may have. ``wgmma_widths``: tile widths of ``wgmma_gemm``; (): there is none.
    ``headers``: the folders of the headers that functions include. ``fragment_access``: whether kernels may access
    elements of fragments. ``grid_barrier``: whether workgroups of one kernel can wait for each other.
    ``arrival_counters``: whether the last workgroup of a kernel can read what the others wrote. ``prefetches``: whether
    there is ``prefetch``. ``overlaps``: whether a kernel may run beside its predecessor. ``has_double``: whether
    ``double`` is available for running sums. ``fast``: scalar ops with a ``_fast`` function. ``special``: the target's
    own functions, which are tried before the common ones. ``clustered(head, count)``: the opening of a kernel whose
    workgroups form clusters of ``count``.
    """

    name: str
    prelude: str
    entry: Callable[[str, Sequence[Param], int, int], str]
    shared: Callable[[Sequence[Array]], tuple[list[str], int]]
    device: GPU
    matrix: tuple[int, ...] = ()
    matrix_types: tuple[str, ...] = ()
    matrix_tf32: tuple[int, ...] = ()
    stages: int = 2
    max_params: int = 500
    wgmma_widths: tuple[int, ...] = ()
    headers: tuple[Path, ...] = (KERNELS,)
    fragment_access: bool = False
    grid_barrier: bool = False
    arrival_counters: bool = False
    prefetches: bool = False
    overlaps: bool = False
    has_double: bool = False
    fast: tuple[str, ...] = ()
    special: tuple[Special, ...] = ()
    clustered: Callable[[str, int], str] = _no_clusters

    def special_for(self, kernel: Kernel) -> Special | None:
        """Return the target's own function for ``kernel``, or None if it has none."""
        return next((s for s in self.special if s.kernel is type(kernel) and s.supports(kernel, self)), None)

    @cached_property
    def head(self) -> str:
        """The text that precedes every kernel."""
        return f"{self.prelude}\n{(KERNELS / 'common.h').read_text()}"

    def source(self, functions: Iterable[str]) -> str:
        """Return ``functions`` as one text that the target's compiler accepts without any other file."""
        return f"{self.head}\n{pasted(functions, self.headers)}"

    def included(self, functions: Iterable[str]) -> dict[str, str]:
        """Return the text of the headers that ``functions`` include, by name."""
        return included("\n".join(functions), self.headers)
