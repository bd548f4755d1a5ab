"""What a kernel takes: its parameters by Metal's rules, and the function through which the runtime calls it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .tokens import MSLError, Token

SPACES = ("device", "constant", "threadgroup", "thread")
MAX_BUFFERS = 31
POSITIONS = {  # attribute -> field of the runtime's Thread; these are vectors and share one dimension
    "thread_position_in_grid": "in_grid",
    "thread_position_in_threadgroup": "in_group",
    "threadgroup_position_in_grid": "group",
    "threads_per_threadgroup": "group_size",
    "threads_per_grid": "grid_size",
    "threadgroups_per_grid": "groups",
}
INDICES = {
    "thread_index_in_threadgroup": "index",
    "thread_index_in_simdgroup": "lane",
    "simdgroup_index_in_threadgroup": "simdgroup",
    "simdgroups_per_threadgroup": "simdgroups",
    "threads_per_simdgroup": "width",
}


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter. ``role``: 'buffer', 'threadgroup' (both with ``index``) or the builtin attribute's name.
    ``written``: the kernel may write through it; ``coherent``: it may read what other groups of the launch write;
    ``element``: the pointee's type."""

    name: str
    role: str
    index: int
    type: str
    element: str
    written: bool
    reference: bool
    coherent: bool = False


@dataclass
class KernelSignature:
    name: str
    parameters: list[Parameter]
    max_threads: int = 1024

    @property
    def buffers(self) -> list[Parameter]:
        return [p for p in self.parameters if p.role == "buffer"]


def parse_parameter(kernel: str, part: list[Token]) -> tuple[Parameter, str]:
    """One declared parameter of ``kernel``, and its C++."""
    source = "".join(t.text for t in part)
    attributes = re.findall(r"\[\[\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*\]\]", source)
    body = re.sub(r"\[\[.*?\]\]", "", source, flags=re.DOTALL).strip()
    m = re.fullmatch(r"(.*?)(\w+)", body, re.DOTALL)
    if not m or len(attributes) != 1:
        raise MSLError(f"{kernel}: parameter {body!r} needs exactly one attribute")
    declared, name = m[1].strip(), m[2]
    role, index = attributes[0][0], int(attributes[0][1] or 0)
    pointer, reference = "*" in declared, "&" in declared
    if not (pointer or reference):
        if role not in POSITIONS and role not in INDICES:
            raise MSLError(f"{kernel}: {name} has the unknown attribute {role}")
        return Parameter(name, role, 0, declared, declared, False, False), f"{declared} {name}"
    if role not in ("buffer", "threadgroup"):
        raise MSLError(f"{kernel}: {name} is a pointer and needs [[buffer(n)]] or [[threadgroup(n)]]")
    declared, coherent = re.subn(r"\bcoherent\s*\(\s*device\s*\)", "", declared)
    words = re.findall(r"\w+(?:\s*<[^<>]*>)?", declared)
    spaces = [w for w in words if w in SPACES]
    types = [w for w in words if w not in (*SPACES, "const", "volatile", "restrict", "__restrict")]
    if len(spaces) != 1 or len(types) != 1 or spaces[0] == "thread":
        raise MSLError(f"{kernel}: {name} needs exactly one address space: {declared}")
    space, element = spaces[0], types[0]
    if (space == "threadgroup") != (role == "threadgroup"):
        raise MSLError(f"{kernel}: {name} is in {space} memory but has [[{role}({index})]]")
    if reference and space != "constant":
        raise MSLError(f"not in the subset: a reference to {space} memory; use a pointer")
    const = "const" in words or space == "constant"
    written = not const
    if reference:
        return Parameter(name, role, index, declared, element, written, True), f"const {element}& {name}"
    if coherent and space != "device":
        raise MSLError(f"{kernel}: {name} is in {space} memory and cannot be coherent")
    type_ = f"metal::ptr<{'const ' if const else ''}{element}, metal::{'coherent' if coherent else space}_space>"
    return Parameter(name, role, index, type_, element, written, False, bool(coherent)), f"{type_} {name}"


def check_parameters(kernel: str, parameters: list[Parameter]) -> None:
    """Metal's rules: an index serves one parameter, at most 31 buffers, positions agree in their dimension."""
    for role, limit in (("buffer", MAX_BUFFERS), ("threadgroup", MAX_BUFFERS)):
        used = [p.index for p in parameters if p.role == role]
        twice = {i for i in used if used.count(i) > 1}
        if twice:
            raise MSLError(f"{kernel}: {role}({min(twice)}) serves two parameters")
        if used and max(used) >= limit:
            raise MSLError(f"{kernel}: {role}({max(used)}): Metal has {role} indices 0 to {limit - 1}")
    positions = [p for p in parameters if p.role in POSITIONS]
    allowed = {"uint": 1, "ushort": 1, "uint2": 2, "ushort2": 2, "uint3": 3, "ushort3": 3}
    for p in parameters:
        if p.role in POSITIONS and p.type not in allowed:
            raise MSLError(f"{kernel}: {p.name} must be ushort, uint or a vector of them, not {p.type}")
        if p.role in INDICES and p.type not in ("uint", "ushort"):
            raise MSLError(f"{kernel}: {p.name} must be ushort or uint, not {p.type}")
    if len({allowed[p.type] for p in positions}) > 1:
        names = ", ".join(f"{p.type} {p.name}" for p in positions)
        raise MSLError(f"{kernel}: position attributes must agree in their number of components: {names}")


def entries(kernels: list[KernelSignature]) -> str:
    """The functions the runtime calls: one thread of a kernel, and the element sizes of its buffers."""
    out = []
    for k in kernels:
        arguments = []
        for p in k.parameters:
            if p.role == "buffer":
                pointer = f"(const {p.element}*)a.buffers[{p.index}]"
                arguments.append(f"*{pointer}" if p.reference else f"{p.type}::from(a.buffers[{p.index}])")
            elif p.role == "threadgroup":
                arguments.append(f"{p.type}::from(a.shared[{p.index}])")
            elif p.role in POSITIONS:
                arguments.append(f"metal::position<{p.type}>(t.{POSITIONS[p.role]})")
            else:
                arguments.append(f"({p.type})t.{INDICES[p.role]}")
        sizes = ", ".join(f"sizeof({p.element})" for p in k.buffers) or "0"
        out.append(
            f'extern "C" __attribute__((visibility("default"))) void emu_kernel_{k.name}'
            f"(const emu_Arguments& a, const emu_Thread& t) {{ {k.name}({', '.join(arguments)}); }}\n"
            f'extern "C" __attribute__((visibility("default"))) const unsigned emu_sizes_{k.name}[] = {{{sizes}}};\n'
        )
    return "".join(out)
