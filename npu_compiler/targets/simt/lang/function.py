"""One kernel function under construction: its pointer parameters, shared memory and body."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from ....schedule.kernel import Kernel, Operand
from ....support import dtypes
from .dialect import SUBGROUP, Array, Dialect, Param
from .emission import Emission
from .lines import Lines
from .program import TileMap
from .scalar import literal

MAX_PREFETCH = 32 << 10  # bytes of an operand that is prefetched whole
B16_TYPES = ("u8s8", "e4m3x2", "tf32_half")  # C++ types of 2 bytes that are not those of a dtype


Constants = Mapping[str, bool | int | float]


def constants(
    name: str, types: Mapping[str, str], values: Constants, functions: Mapping[str, tuple[str, str, str]] | None = None
) -> str:
    """Return the C++ struct ``name`` with which a kernel template is instantiated.

    ``types``: alias -> C++ type. ``values``: its compile-time constants. ``functions``: static functions, name ->
    (result type, parameters, returned expression).
    """
    fields = [f"typedef {ctype} {alias}" for alias, ctype in types.items()]
    numbers: dict[str, list[str]] = {}
    for key, value in values.items():
        numbers.setdefault(_kind(value), []).append(f"{key} = {literal(value, _kind(value))}")
    fields += [f"CONSTANTS {kind} {', '.join(members)}" for kind, members in numbers.items()]
    lines = [f"struct {name} {{", *(f"{field};" for field in fields)]
    for key, (result, parameters, text) in (functions or {}).items():
        lines.append(f"static INLINE {result} {key}({parameters}) {{ return {text}; }}")
    return "\n  ".join(lines) + "\n};\n"


def _kind(value: bool | int | float) -> str:
    if isinstance(value, (bool, float)):
        return type(value).__name__
    return "int" if -(2**31) <= value < 2**31 else "int64_t"


class Function:
    """A kernel function under construction.

    ``lines``: the body. ``before``: headers and structs in front of the function. ``arrays``: arrays in shared memory.
    ``resident``: workgroups that should be resident on a compute unit; 0: any. ``cluster``: workgroups of a cluster.
    ``maps``: tensor maps, by operand. ``explicit_wait``: the body itself calls ``pdl_wait()``; otherwise it comes
    first. ``launch_dependents``: the next kernel may start at once; otherwise the body calls
    ``pdl_launch_dependents()``.
    """

    def __init__(self, kernel: Kernel, dialect: Dialect, explicit_wait: bool = False, launch_dependents: bool = True):
        self.kernel, self.dialect = kernel, dialect
        self.lines = Lines()
        self.before: list[str] = []
        self.arrays: list[Array] = []
        self.checks = False
        self.resident = 0
        self.cluster = 1
        self.maps: list[tuple[int, TileMap]] = []
        self._params: dict[int, Param] = {}
        self._written = {o.buffer.id for o in kernel.outputs}
        if launch_dependents:
            self.lines.add("pdl_launch_dependents();")
        if not explicit_wait:
            self.prefetch_constants()
            self.lines.add("pdl_wait();")

    def prefetch_constants(self, first: int = 0) -> None:
        """Prefetch small weights among the inputs from ``first`` on, before the kernel waits for its predecessor."""
        if self.dialect.prefetches:
            for n, o in enumerate(self.kernel.inputs[first:], first):
                nbytes = math.prod(o.shape) * dtypes.DTYPES[o.dtype].size
                constant = o.buffer.constant and o.buffer.id not in self._written
                if constant and o.contiguous and 0 < nbytes <= MAX_PREFETCH:
                    self.lines.add(f"prefetch({self.pointer(n)}, {nbytes}, tid);")

    def operand(self, number: int) -> Operand:
        """Return input ``number`` or output ``~number``."""
        return self.kernel.inputs[number] if number >= 0 else self.kernel.outputs[~number]

    def pointer(self, number: int) -> str:
        """Return the name of the pointer to input ``number`` or output ``~number``; add the parameter if it is new."""
        return self.param(number).name

    def param(self, number: int) -> Param:
        """Return the pointer parameter of input ``number`` or output ``~number``; add it if it is new."""
        if number not in self._params:
            op = self.operand(number)
            name = f"a{number}" if number >= 0 else f"b{~number}"
            constant = op.buffer.constant and op.buffer.id not in self._written
            self._params[number] = Param(dtypes.DTYPES[op.dtype].ctype, name, number < 0, constant)
        return self._params[number]

    def coherent(self, number: int) -> str:
        """Return the name of the pointer to output ``~number``, through which workgroups read what others wrote."""
        self._params[number] = self.param(number)._replace(coherent=True)
        return self.pointer(number)

    def tile_map(self, number: int, tiles: TileMap) -> str:
        """Add a tensor map through which TMA accesses tiles of operand ``number``, and return its name."""
        self.maps.append((number, tiles))
        return f"m{len(self.maps) - 1}"

    def array(self, ctype: str, name: str, count: int, size: int = 0) -> str:
        """Declare an array of ``count`` elements in shared memory and return its name. ``size``: of an element of a
        struct, in bytes."""
        sizes = (
            {ctype: size}
            if size
            else {t.ctype: t.size for t in dtypes.DTYPES.values()} | {"bool": 1, "int": 4} | dict.fromkeys(B16_TYPES, 2)
        )
        self.arrays.append(Array(ctype, name, count, sizes[ctype]))
        return name

    def template(self, name: str, header: str, types: Mapping[str, str], values: Constants, *arguments: str) -> None:
        """Let the body call function template ``name`` of kernel file ``header``, instantiated with a struct of
        ``types`` and constant ``values``. ``arguments`` precede the thread's position."""
        self.include(header)
        self.before.append(constants("@NAME@_sizes", types, values))
        self.lines.add(f"{name}<@NAME@_sizes>({', '.join(arguments)}, Thread{{workgroup, tid, lane, subgroup}});")

    def include(self, header: str) -> None:
        """Include kernel file ``header`` in front of the function."""
        line = f'#include "{header}"\n'
        if line not in self.before:
            self.before.append(line)

    def functor(self, name: str, values: Constants, **functions: tuple[str, str, str]) -> str:
        """Define a struct with ``values`` and ``functions`` (see :func:`constants`), and return its name."""
        self.before.append(constants(f"@NAME@_{name}", {}, values, functions))
        return f"@NAME@_{name}"

    def rows(self, name: str, op: Operand, axis: int) -> str:
        """Define a struct with the positions of the rows of ``op`` along ``axis``, and return its name: ``row(n)`` is
        the offset of row n, counted in order over all other dims, and ``STEP`` the stride along a row, both in
        elements."""
        divisor, terms = 1, []
        for d in reversed(range(len(op.shape))):
            if d != axis:
                if op.strides[d]:
                    terms.append(f"(int64_t)(n / {divisor} % {op.shape[d]}) * {op.strides[d]}")
                divisor *= op.shape[d]
        step = op.strides[axis] if op.strides else 0
        return self.functor(name, {"STEP": step}, row=("int64_t", "int n", " + ".join(terms) or "0"))

    def finish(self, workgroups: int, threads: int) -> Emission:
        """Return the function, which is launched with ``workgroups`` of ``threads`` threads; 0: it is never
        launched."""
        if not workgroups:
            return Emission("", (), 0, threads)
        order = sorted(self._params, key=lambda n: (n < 0, abs(n)))
        params = [self._params[n] for n in order]
        if self.checks:
            params.append(Param("int", "bad", True, False))
        params += [Param("TensorMap", f"m{i}", False, True) for i in range(len(self.maps))]
        declared, dynamic = self.dialect.shared(self.arrays)
        head = self.dialect.entry("@NAME@", params, threads, self.resident)
        if self.cluster > 1:
            head = self.dialect.clustered(head, self.cluster)
        body = "".join(self.before) + "\n".join([head, *("  " + d for d in declared), *self.lines.text, "}\n"])
        return Emission(body, tuple(order), workgroups, threads, dynamic, self.checks, tuple(self.maps))


def blocks(count: int, size: int) -> int:
    """Return ``count`` / ``size``, rounded up."""
    return -(-count // size)


def subgroups(threads: int) -> int:
    """Return the number of subgroups of ``threads`` threads."""
    return blocks(threads, SUBGROUP)


class Scope(Protocol):
    """The place where expressions are rendered: the body of a function, or of a struct's methods. ``lines``: its
    statements. ``checks``: whether one of them reports an index out of range or a
    divisor of zero."""

    dialect: Dialect
    lines: Lines
    checks: bool

    def pointer(self, number: int) -> str:
        """Return the name of the pointer to input ``number`` or output ``~number``."""

    def array(self, ctype: str, name: str, count: int) -> str:
        """Declare an array of ``count`` elements in shared memory and return its name."""

    def include(self, header: str) -> None:
        """Include kernel file ``header``, whose definitions the statements use."""


class Members:
    """A :class:`Scope`: the members and methods of struct ``name``, which a function instantiates. Pointers that
    methods use are members, initialised with those of the function, or with the array in shared memory that ``held``
    names for an operand. :meth:`finish` puts the struct in front of the function."""

    def __init__(self, function: Function, name: str):
        self.function, self.name, self.dialect = function, name, function.dialect
        self.lines, self.checks = Lines(), False
        self.held: dict[int, str] = {}
        self._numbers: list[int] = []
        self._captured: list[tuple[str, str]] = []
        self._fields: list[str] = []

    def pointer(self, number: int) -> str:
        if number not in self._numbers:
            self._numbers.append(number)
        return self.function.pointer(number)

    def array(self, ctype: str, name: str, count: int) -> str:
        self.capture(f"SMEM {ctype}*", name)
        return self.function.array(ctype, name, count)

    def capture(self, kind: str, name: str) -> None:
        """Add a member of C++ type ``kind``, initialised with the function's variable ``name``."""
        self._captured.append((kind, name))

    def include(self, header: str) -> None:
        self.function.include(header)

    def field(self, kind: str, name: str) -> None:
        """Add a member of C++ type ``kind`` that is not initialised: methods write and read it."""
        self._fields.append(f"{kind} {name};")

    def finish(self) -> str:
        """Define the struct, and return the C++ expression that instantiates it."""
        params = [self.function.param(n) for n in self._numbers]
        fields = [f"DEVICE {'' if p.writable else 'const '}{p.ctype}* {p.name};" for p in params]
        fields += ["DEVICE int* bad;"] * self.checks
        fields += [f"{kind} {name};" for kind, name in self._captured]
        fields += self._fields
        body = "\n".join((*(f"  {field}" for field in fields), *self.lines.text))
        self.function.before.append(f"struct {self.name} {{\n{body}\n}};\n")
        self.function.checks |= self.checks
        captured = [name for _, name in self._captured]
        given = [self.held.get(n, p.name) for n, p in zip(self._numbers, params, strict=True)]
        return f"{self.name}{{{', '.join([*given, *['bad'] * self.checks, *captured])}}}"


class Pointers(dict[int, str]):
    """Pointer names by operand number, which become parameters of a function on first use. ``numbers``: maps the
    operand numbers to those of the function, if they differ."""

    def __init__(self, function: Scope, numbers: dict[int, int] | None = None):
        super().__init__()
        self._function, self._numbers = function, numbers

    def __missing__(self, number: int) -> str:
        return self._function.pointer(number if self._numbers is None else self._numbers[number])
