"""The vocabulary of the SIMT kernels, and how a target spells it.

A kernel is plain C++ text over these words; ``kernels/common.h`` builds the rest on them. A dialect's ``prelude``
defines:

types       ``f16 bf16 bool8 int8_t uint8_t int16_t int32_t int64_t float`` (storage), ``double`` if the target has it;
            ``uint``, ``uint4`` (16 bytes, members x y z w)
words       ``DEVICE`` before pointers to device memory, ``GROUP`` before pointers to group memory, ``THREAD`` before
            references to a thread's own variables, ``INLINE`` before helper functions, ``CONSTANT`` before tables
conversion  ``float to_f32(f16)``, ``to_f32(bf16)``, ``f16 to_f16(float)``, ``bf16 to_bf16(float)``
simd        32 lanes: ``T simd_xor(T, int)`` (the value of lane ^ mask; float, int), ``void simd_barrier()``
group       ``void barrier()``: all threads of a group, group memory ordered
report      ``set_flag(DEVICE int*)``: makes it 1; any number of threads may
loads       ``uint4 load16(DEVICE const void*)`` and ``stream16``: of data that is read once and written by nobody
order       ``release_next()``: the next kernel may start; ``wait_inputs()``: what earlier kernels wrote is visible from
            here on (weights may be read before). Both may be nothing.
copies      ``copy16(GROUP void*, DEVICE const void*, bool valid)`` (zeros if not valid), ``copy_commit()``,
            ``copy_wait<N>()``: all but the last N commits have arrived. A plain copy and nothing, where copies block.
matrix      ``FragA<T>``, ``FragB<T>``, ``FragC``, ``frag_load_a/b(frag, GROUP const T* p, int ld, int lane)`` of
            [M, K] and [N, K] windows, ``frag_zero``, ``frag_mma(c, a, b)``, ``frag_store(GROUP float* p, int ld, c,
            lane)``; sizes in :attr:`Dialect.matrix`
flash       what a simd must know of its fragments to go from one product to the next: ``frag_row(lane, i)`` and
            ``frag_column(lane, i)`` of result i of four (0 1, 2 3 in one row each), ``frag_row_max``, ``frag_row_sum``
            over the lanes of a row, ``frag_from_results(a, left, right)``, ``frag_load_b2`` (two neighbours along N),
            ``frag_load_turned`` (two, from memory that is [K, N]), ``m_exp2_fast``; only with :attr:`Dialect.flash`
wide        four simds together, on tiles of 64 elements a row, 16-byte chunks at ``wide_at(row, chunk)``:
            ``WideC<N>``, ``wide_zero``, ``wide_ready()`` (copies are visible to the unit), ``wide_begin()``,
            ``wide_mma(c, GROUP const T* a, GROUP const T* b)``, ``wide_commit()``, ``wide_wait<N>()``,
            ``wide_store(GROUP float* p, int ld, c, lane)``; only with :attr:`Dialect.wide`
maths       ``m_exp`` and so on for each scalar op that is no operator, on float (and double)

The entry line of a kernel brings ``const int gid, tid, lane, sid``: group, thread in the group, lane in the simd, simd
in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

KERNELS = Path(__file__).with_name("kernels")
SIMD = 32


class Param(NamedTuple):
    """A pointer parameter of a kernel. ``writable``: stored through; ``constant``: no kernel writes it."""

    ctype: str
    name: str
    writable: bool
    constant: bool


class Array(NamedTuple):
    """An array in group memory; 16-byte aligned."""

    ctype: str
    name: str
    length: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return -(-self.length * self.itemsize // 16) * 16


@dataclass(frozen=True)
class Dialect:
    """How a target spells the vocabulary.

    ``entry(name, params, threads, groups_per_core)``: the opening of a kernel up to ``{`` with its first lines.
    ``shared(arrays)``: declarations of group memory, and the bytes to ask for at launch (0: none). ``matrix``: (M, N,
    K) of the matrix unit, () without one; ``matrix_types``: its element types. ``group_bytes``: group memory a kernel
    may use; ``stages``: of a ring of copies in it; ``cores``: that should have work; ``most_params``: pointers that a
    kernel may take; ``wide``: column counts of the wide matrix unit; ``flash``: whether fragments can be looked into;
    ``words``: text behind the common definitions.
    """

    name: str
    prelude: str
    entry: Callable[[str, Sequence[Param], int, int], str]
    shared: Callable[[Sequence[Array]], tuple[list[str], int]]
    group_bytes: int
    matrix: tuple[int, ...] = ()
    matrix_types: tuple[str, ...] = ()
    stages: int = 2
    cores: int = 132
    most_params: int = 500
    wide: tuple[int, ...] = ()
    words: str = ""
    flash: bool = False

    @cached_property
    def head(self) -> str:
        """The text before every kernel."""
        return f"{self.prelude}\n{(KERNELS / 'common.h').read_text()}{self.words}"
