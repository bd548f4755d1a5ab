"""One kernel function under construction: its pointer parameters, shared memory and body."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from ....schedule.kernel import Kernel, Operand
from ....support import dtypes
from .dialect import SUBGROUP, Array, Dialect, Param
from .emission import Emission
from .program import TileMap
from .scalar import Lines, literal

MAX_PREFETCH = 32 << 10  # bytes of an operand


Constants = Mapping[str, bool | int | float]


def constants(
    name: str, types: Mapping[str, str], values: Constants, functions: Mapping[str, tuple[str, str, str]] | None = None
) -> str:
    """A C++ struct that a kernel template is instantiated with: ``types``, compile-time constants ``values``, and
    static ``functions`` by name: result type, parameters, and the expression that is returned."""
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
    """``lines`` is the body; :meth:`pointer` adds a parameter; ``arrays`` are in shared memory. ``before``: headers and
    structs in front of it. ``early``: the body says itself when it waits for its inputs; ``release``: the next kernel
    may start at once."""

    def __init__(self, kernel: Kernel, dialect: Dialect, early: bool = False, release: bool = True):
        self.kernel, self.dialect = kernel, dialect
        self.lines = Lines()
        self.before: list[str] = []
        self.arrays: list[Array] = []
        self.checks = False
        self.per_unit = 0  # groups that should fit on a core at once; 0: no matter
        self.cluster = 1  # neighbouring groups that run together and see each other's memory
        self.maps: list[tuple[int, TileMap]] = []
        self._params: dict[int, Param] = {}
        self._written = {o.buffer.id for o in kernel.outputs}
        if release:
            self.lines.add("pdl_launch_dependents();")
        if not early:
            self.prefetch_constants()
            self.lines.add("pdl_wait();")

    def prefetch_constants(self, first: int = 0) -> None:
        """Small weights among the inputs from ``first`` on are on their way while the kernel waits."""
        if self.dialect.asks:
            for n, o in enumerate(self.kernel.inputs[first:], first):
                nbytes = math.prod(o.shape) * dtypes.DTYPES[o.dtype].size
                constant = o.buffer.kind in ("weight", "const") and o.buffer.id not in self._written
                if constant and o.contiguous and 0 < nbytes <= MAX_PREFETCH:
                    self.lines.add(f"prefetch({self.pointer(n)}, {nbytes}, tid);")

    def operand(self, number: int) -> Operand:
        return self.kernel.inputs[number] if number >= 0 else self.kernel.outputs[~number]

    def pointer(self, number: int) -> str:
        """The name of the pointer to input ``number`` or output ``~number``."""
        return self.param(number).name

    def param(self, number: int) -> Param:
        """The parameter that is the pointer to input ``number`` or output ``~number``."""
        if number not in self._params:
            op = self.operand(number)
            name = f"a{number}" if number >= 0 else f"b{~number}"
            constant = op.buffer.kind in ("weight", "const") and op.buffer.id not in self._written
            self._params[number] = Param(dtypes.DTYPES[op.dtype].ctype, name, number < 0, constant)
        return self._params[number]

    def tile_map(self, number: int, tiles: TileMap) -> str:
        """The name of a parameter through which TMA reads tiles of operand ``number``."""
        self.maps.append((number, tiles))
        return f"m{len(self.maps) - 1}"

    def array(self, ctype: str, name: str, count: int) -> str:
        """Declare an array in shared memory and return its name."""
        size = {"float": 4, "int": 4, "double": 8, "int64_t": 8, "bool": 1, "f16": 2, "bf16": 2}[ctype]
        self.arrays.append(Array(ctype, name, count, size))
        return name

    def template(self, name: str, header: str, types: Mapping[str, str], values: Constants, *arguments: str) -> None:
        """The body calls function template ``name`` of kernel file ``header``, instantiated with a struct of ``types``
        and constant ``values``; ``arguments`` go before the thread's place."""
        self.include(header)
        self.before.append(constants("@NAME@_sizes", types, values))
        self.lines.add(f"{name}<@NAME@_sizes>({', '.join(arguments)}, Thread{{gid, tid, lane, sid}});")

    def include(self, header: str) -> None:
        """The function uses what kernel file ``header`` defines."""
        line = f'#include "{header}"\n'
        if line not in self.before:
            self.before.append(line)

    def functor(self, name: str, values: Constants, **functions: tuple[str, str, str]) -> str:
        """The name of a struct for the kernel template alone: see :func:`constants`."""
        self.before.append(constants(f"@NAME@_{name}", {}, values, functions))
        return f"@NAME@_{name}"

    def rows(self, name: str, op: Operand, axis: int) -> str:
        """A struct that says where the rows of ``op`` along ``axis`` lie: ``row(n)``, the offset of row n, counted in
        order over all other dims, and ``STEP``, the stride along a row. Offsets are in elements."""
        unit, terms = 1, []
        for d in reversed(range(len(op.shape))):
            if d != axis:
                if op.strides[d]:
                    terms.append(f"(int64_t)(n / {unit} % {op.shape[d]}) * {op.strides[d]}")
                unit *= op.shape[d]
        step = op.strides[axis] if op.strides else 0
        return self.functor(name, {"STEP": step}, row=("int64_t", "int n", " + ".join(terms) or "0"))

    def finish(self, groups: int, threads: int) -> Emission:
        if not groups:
            return Emission("", (), 0, threads)
        order = sorted(self._params, key=lambda n: (n < 0, abs(n)))
        params = [self._params[n] for n in order]
        if self.checks:
            params.append(Param("int", "bad", True, False))
        params += [Param("TensorMap", f"m{i}", False, True) for i in range(len(self.maps))]
        declared, dynamic = self.dialect.shared(self.arrays)
        head = self.dialect.entry("@NAME@", params, threads, self.per_unit)
        if self.cluster > 1:
            head = self.dialect.clustered(head, self.cluster)
        body = "".join(self.before) + "\n".join([head, *("  " + d for d in declared), *self.lines.text, "}\n"])
        return Emission(body, tuple(order), groups, threads, dynamic, self.checks, tuple(self.maps))


def blocks(count: int, size: int) -> int:
    return -(-count // size)


def subgroups(threads: int) -> int:
    return blocks(threads, SUBGROUP)


class Scope(Protocol):
    """Where expressions are rendered: the body of a function or of a struct's method. ``checks``: whether one of them
    reports an index out of range."""

    dialect: Dialect
    lines: Lines
    checks: bool

    def pointer(self, number: int) -> str:
        """The name of the pointer to input ``number`` or output ``~number``."""

    def array(self, ctype: str, name: str, count: int) -> str:
        """The name of an array in shared memory."""

    def include(self, header: str) -> None:
        """What is written uses what kernel file ``header`` defines."""


class Members:
    """The members and methods of a struct that a function calls. A method's pointers are members, set to those of the
    function; :meth:`finish` puts the struct in front of it."""

    def __init__(self, function: Function, name: str):
        self.function, self.name, self.dialect = function, name, function.dialect
        self.lines, self.checks = Lines(), False
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
        """A member that has the value of the function's variable of that name."""
        self._captured.append((kind, name))

    def include(self, header: str) -> None:
        self.function.include(header)

    def field(self, kind: str, name: str) -> None:
        """A member that methods write and read."""
        self._fields.append(f"{kind} {name};")

    def finish(self) -> str:
        """Define the struct; an expression that makes one."""
        params = [self.function.param(n) for n in self._numbers]
        fields = [f"DEVICE {'' if p.writable else 'const '}{p.ctype}* {p.name};" for p in params]
        fields += ["DEVICE int* bad;"] * self.checks
        fields += [f"{kind} {name};" for kind, name in self._captured]
        fields += self._fields
        body = "\n".join((*(f"  {field}" for field in fields), *self.lines.text))
        self.function.before.append(f"struct {self.name} {{\n{body}\n}};\n")
        self.function.checks |= self.checks
        captured = [name for _, name in self._captured]
        return f"{self.name}{{{', '.join([*(p.name for p in params), *['bad'] * self.checks, *captured])}}}"


class Pointers(dict[int, str]):
    """Pointer names by operand number, made parameters of a function when they are first asked for. ``numbers``: the
    function's operand for each of those asked for, if they differ."""

    def __init__(self, function: Scope, numbers: dict[int, int] | None = None):
        super().__init__()
        self._function, self._numbers = function, numbers

    def __missing__(self, number: int) -> str:
        return self._function.pointer(number if self._numbers is None else self._numbers[number])
