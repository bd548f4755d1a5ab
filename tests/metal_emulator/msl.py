"""Metal Shading Language -> C++: one pass over the tokens of a ``.metal`` text.

The C++ that comes out keeps every line where it was and compiles against ``include/msl.h``. What changes:

* ``device const half* x`` becomes ``metal::ptr<const half, metal::device_space> x``: a class per address space, so
  that any C++ compiler finds mixed address spaces.
* ``coherent(device) device float* x`` is a pointer of a class of its own: it does not mix with other device pointers.
* ``threadgroup float tile[64];`` becomes a pointer into the threadgroup's memory.
* attributes ``[[...]]`` go, and each kernel gets an entry function that passes buffers and positions.
* ``0.5`` is a float, ``0.5h`` a half; vector swizzles become calls.
* every call that threads meet in (barriers, ``simd_*``) is told where it stands, through any functions of the text that
  lie between a kernel and it: that identifies the meeting point.

Macros must have been expanded (:func:`tests.metal_emulator.build.preprocess`).

What the pass refuses is outside the subset (:class:`MSLError` with the line): see ``README.md``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .kernels import SPACES, KernelSignature, check_parameters, entries, parse_parameter
from .tokens import MARKER, NEWEST, MSLError, Token, number, split, tokens

T = TypeVar("T")


VECTORS = {
    f"{t}{n}" for t in "bool char uchar short ushort int uint long ulong half bfloat float".split() for n in "234"
}
SCALARS = set("bool char uchar short ushort int uint long ulong half bfloat float size_t void".split())
FORBIDDEN = {
    "double": "there is no double in Metal",
    "goto": "there is no goto in Metal",
    "try": "there are no exceptions in Metal",
    "throw": "there are no exceptions in Metal",
    "catch": "there are no exceptions in Metal",
    "new": "there is no operator new in Metal",
    "delete": "there is no operator delete in Metal",
    "virtual": "there are no virtual functions in Metal",
    "dynamic_cast": "there is no dynamic_cast in Metal",
    "typeid": "there is no typeid in Metal",
    "thread_local": "there is no thread_local in Metal",
    "asm": "there is no asm in Metal",
    "std": "there is no namespace std in Metal",
    "__shared__": "that is CUDA",
    "__syncthreads": "that is CUDA",
    "__global__": "that is CUDA",
    "__device__": "that is CUDA",
}
# Functions whose calls are meeting points of threads.
MEETS = re.compile(r"(threadgroup|simdgroup)_barrier|simdgroup_multiply(_accumulate)?|simd_[a-z_]+")
NOT_MEETS = {"simd_vote"}
NOT_FUNCTIONS = {"if", "for", "while", "switch", "return", "sizeof", "alignas", "alignof", "decltype"}
SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{2,4}")


@dataclass
class Translation:
    """The C++ text and the kernels that it has."""

    text: str
    kernels: list[KernelSignature] = field(default_factory=list)


class Translator:
    """Walks the tokens of one file; ``out`` is the C++ so far."""

    def __init__(self, source: str, name: str, version: int):
        self.name, self.version = name, version
        self.tokens = tokens(source)
        self.at = 0
        self.out: list[str] = []
        self.kernels: list[KernelSignature] = []
        self.depth = 0
        self.kernel_depth: int | None = None  # the depth at which the current kernel's body stands
        self.shared = 0  # threadgroup variables so far
        self.sites = 0  # meeting points so far
        self.meeting_depth: int | None = None  # that of the current function, if it was told its caller's meeting point
        self.own = self.own_functions()
        self.imports = re.search(r"\busing\s+namespace\s+metal\b", source) is not None
        self.meeting = self.meeting_functions()

    # -------------------------------------------------------------------------------------------------- token access
    def error(self, message: str, line: int | None = None) -> MSLError:
        if line is None:
            line = self.tokens[min(self.at, len(self.tokens) - 1)].line
        return MSLError(f"{self.name}:{line}: {message}")

    def checked(self, rule: Callable[..., T], *arguments: Any) -> T:
        """What ``rule`` returns; its refusal gets the file and the line."""
        try:
            return rule(*arguments)
        except MSLError as refusal:
            raise self.error(str(refusal)) from None

    def skip(self, i: int) -> int:
        """The first token at or after ``i`` that is not blank."""
        while i < len(self.tokens) and self.tokens[i].kind == "space":
            i += 1
        return i

    def peek(self, i: int) -> str:
        i = self.skip(i)
        return self.tokens[i].text if i < len(self.tokens) else ""

    def closing(self, i: int, pair: str) -> int:
        """The token that closes the bracket at ``i``; ``pair`` is such as '()'."""
        depth, start = 0, i
        while i < len(self.tokens):
            text = self.tokens[i].text
            if text == pair[0]:
                depth += 1
            elif text == pair[1]:
                depth -= 1
                if depth == 0:
                    return i
            i += 1
        raise self.error(f"unbalanced {pair[0]}", self.tokens[start].line)

    def blanks(self, start: int, end: int) -> str:
        """The line breaks of tokens start..end, so that what replaces them keeps the lines."""
        return "\n" * sum(t.text.count("\n") for t in self.tokens[start:end])

    # ------------------------------------------------------------------------------------------------- meeting points
    def own_functions(self) -> dict[str, list[tuple[int, int]]]:
        """Functions that the text defines: their bodies, as first and last token."""
        found: dict[str, list[tuple[int, int]]] = {}
        words = [i for i, t in enumerate(self.tokens) if t.kind == "word" and t.text not in NOT_FUNCTIONS]
        for i in words:
            if self.peek(i + 1) == "(" and self.is_definition(i):
                body = self.skip(self.closing(self.skip(i + 1), "()") + 1)
                body = body if self.tokens[body].text == "{" else self.skip(body + 1)
                found.setdefault(self.tokens[i].text, []).append((body, self.closing(body, "{}")))
        return found

    def is_definition(self, i: int) -> bool:
        before = i - 1
        while before >= 0 and self.tokens[before].kind == "space":
            before -= 1
        named = before >= 0 and (self.tokens[before].kind == "word" or self.tokens[before].text in ">*&")
        if not named or self.tokens[before].text in ("return", "else"):
            return False
        after = self.closing(self.skip(i + 1), "()") + 1
        return self.peek(after) == "{" or (self.peek(after) == "const" and self.peek(self.skip(after) + 1) == "{")

    def is_library_meeting(self, i: int) -> bool:
        """Whether token ``i`` names one of Metal's functions that threads meet in."""
        text = self.tokens[i].text
        if not MEETS.fullmatch(text) or text in NOT_MEETS or self.peek(i + 1) not in ("(", "<"):
            return False
        if i >= 2 and self.tokens[i - 1].text == "::":
            return self.tokens[i - 2].text == "metal"
        return self.imports and text not in self.own

    def meeting_functions(self) -> set[str]:
        """Functions of the text that threads meet in: those that call Metal's, or one another."""
        found: set[str] = set()
        size = -1
        while size != len(found):
            size = len(found)
            for name, bodies in self.own.items():
                for start, end in bodies:
                    inside = range(start, end)
                    if any(self.tokens[i].text in found or self.is_library_meeting(i) for i in inside):
                        found.add(name)
        return found

    def meet(self, token: Token) -> None:
        """``simd_sum(x)`` -> ``simd_sum(metal::site::root(7, 12, "simd_sum"), x)``; in a function, the caller's."""
        i = self.skip(self.at + 1)
        if self.tokens[i].text == "<":
            i = self.skip(self.closing(i, "<>") + 1)
        comma = "" if self.peek(i + 1) == ")" else ", "
        head = "".join(t.text for t in self.tokens[self.at : i + 1])
        if token.text in self.meeting and self.is_definition(self.at):
            self.out.append(f"{head}metal::site at_{comma}")
            self.meeting_depth = self.depth
        else:
            self.sites += 1
            base = "metal::site::root" if self.meeting_depth is None else "at_.then"
            self.out.append(f'{head}{base}({self.sites}u, {token.line}u, "{token.text}"){comma}')
        self.at = i + 1

    # ------------------------------------------------------------------------------------------------------ main loop
    def run(self) -> Translation:
        while self.at < len(self.tokens):
            self.step()
        return Translation("".join(self.out) + "\n" + entries(self.kernels), self.kernels)

    def step(self) -> None:
        token = self.tokens[self.at]
        if token.kind == "directive":
            self.directive(token)
        elif token.kind == "number":
            self.emit(self.checked(number, token.text))
        elif token.kind == "word":
            self.word(token)
        elif token.text == "[" and self.at + 1 < len(self.tokens) and self.tokens[self.at + 1].text == "[":
            self.attribute()
        elif token.text == "&" and self.address_of():
            pass
        elif token.text == "." and SWIZZLE.fullmatch(self.peek(self.at + 1)):
            name = self.skip(self.at + 1)
            self.out.append(f".swizzle_{self.tokens[name].text}()")
            self.at = name + 1
        else:
            if token.text == "{":
                self.depth += 1
            elif token.text == "}":
                self.depth -= 1
                if self.depth == self.kernel_depth:
                    self.kernel_depth = None
                if self.depth == self.meeting_depth:
                    self.meeting_depth = None
            self.emit(token.text)

    def emit(self, text: str) -> None:
        self.out.append(text)
        self.at += 1

    def directive(self, token: Token) -> None:
        include = re.match(r"\s*#\s*include\s*<metal_\w+>", token.text)
        if include or re.match(r"\s*#\s*pragma", token.text):
            self.emit("")
        elif MARKER.match(token.text):
            self.emit(token.text)
        else:
            raise self.error(f"not in the subset: {token.text.strip()}")

    def word(self, token: Token) -> None:
        text, after = token.text, self.peek(self.at + 1)
        if text in FORBIDDEN:
            raise self.error(FORBIDDEN[text])
        if text in ("fragment", "vertex"):
            raise self.error("not in the subset: graphics functions")
        if text == "kernel":
            self.at += 1
            self.kernel()
        elif text == "const" and after in SPACES:
            self.at = self.skip(self.at + 1)
            self.qualified(const=True)
        elif text in SPACES:
            self.qualified(const=False)
        elif text == "coherent":
            self.coherent()
        elif text == "if" and after == "constexpr":
            raise self.error("if constexpr is C++17; Metal is C++14")
        elif text == "long" and after == "long":
            raise self.error("there is no long long in Metal: long has 64 bits")
        elif text in SCALARS | VECTORS and after == "*" and self.peek(self.skip(self.at + 1) + 1) not in "+-(":
            raise self.error(f"a pointer to {text} without an address space (device, constant, threadgroup or thread)")
        elif self.is_library_meeting(self.at) or (text in self.meeting and after in ("(", "<")):
            self.meet(token)
        else:
            self.emit(text)

    def address_of(self) -> bool:
        """``&p[i]`` -> ``(p + (i))``, which keeps p's address space. False where the & is something else."""
        before = "".join(self.out[-8:]).rstrip()
        if not before or (before[-1] not in "(,=?:{;+-" and not before.endswith("return")):
            return False
        name = self.skip(self.at + 1)
        bracket = self.skip(name + 1)
        if self.tokens[name].kind != "word" or self.tokens[bracket].text != "[":
            return False
        end = self.closing(bracket, "[]")
        if self.peek(end + 1) in ("[", ".", "->"):
            raise self.error("not in the subset: the address of a part of an element")
        self.out.append(f"({self.tokens[name].text} + (")
        self.tokens[end] = Token("mark", "))", self.tokens[end].line)
        self.at = bracket + 1
        return True

    # ------------------------------------------------------------------------------------------------- address spaces
    def type_name(self) -> str:
        """The type at the cursor, with qualifiers' template arguments; the cursor moves behind it."""
        parts = ["typename "] if self.take("typename") else []
        self.at = self.skip(self.at)
        while True:
            token = self.tokens[self.at]
            if token.kind != "word":
                raise self.error(f"a type is expected before {token.text!r}")
            parts.append(token.text)
            self.at += 1
            if self.peek(self.at) == "<":
                start = self.skip(self.at)
                end = self.closing(start, "<>")
                parts.append("".join(t.text for t in self.tokens[start : end + 1]))
                self.at = end + 1
            if self.peek(self.at) != "::":
                return "".join(parts)
            parts.append("::")
            self.at = self.skip(self.skip(self.at) + 1)

    def take(self, *words: str) -> bool:
        """Skip over any of ``words``; whether there was one."""
        found = False
        while self.peek(self.at) in words:
            self.at = self.skip(self.at) + 1
            found = True
        return found

    def coherent(self) -> None:
        """``coherent(device) device T*``."""
        if self.version < 320:
            raise self.error("coherent came with Metal 3.2")
        start = self.skip(self.at + 1)
        end = self.closing(start, "()") if self.peek(self.at + 1) == "(" else start
        if self.peek(start + 1) != "device" or self.peek(end + 1) != "device":
            raise self.error("not in the subset: coherent, but not coherent(device) device")
        self.at = self.skip(end + 1)
        self.qualified(const=False, coherent=True)

    def qualified(self, const: bool, coherent: bool = False) -> None:
        """A type with an address space, at that space's name."""
        start = self.at
        space = self.tokens[self.at].text
        self.at += 1
        compile_time = self.peek(self.at) == "constexpr" and self.take("constexpr")
        const = self.take("const", "volatile") or const or space == "constant"
        element = self.type_name()
        const = self.take("const") or const
        blanks = self.blanks(start, self.at)
        if self.peek(self.at) == "*":
            self.at = self.skip(self.at) + 1
            if self.peek(self.at) == "*":
                raise self.error("not in the subset: a pointer to a pointer")
            self.take("restrict", "__restrict")
            qualifier = "const " if const else ""
            kind = "coherent" if coherent else space
            self.out.append(f"metal::ptr<{qualifier}{element}, metal::{kind}_space>{blanks}")
        elif coherent:
            raise self.error("only pointers are coherent")
        elif self.peek(self.at) == "&":
            if space in ("device", "threadgroup"):
                raise self.error(f"not in the subset: a reference to {space} memory; use a pointer")
            self.out.append(f"{'const ' if const else ''}{element}{blanks}")
        elif space == "threadgroup":
            self.threadgroup_variables(element)
        elif space == "constant":
            member = "".join(self.out[-2:]).rstrip().endswith("static")
            qualifier = "constexpr" if compile_time else "const"
            self.out.append(f"{'' if member else 'static '}{qualifier} {element}{blanks}")
        elif space == "thread":
            self.out.append(f"{'const ' if const else ''}{element}{blanks}")
        else:
            raise self.error("a variable cannot stand in device memory")

    def threadgroup_variables(self, element: str) -> None:
        """``threadgroup float a[4], b;`` at the name of the first."""
        if self.kernel_depth is None:
            raise self.error("threadgroup variables may stand only in a kernel's own body")
        while True:
            self.at = self.skip(self.at)
            name = self.tokens[self.at]
            self.at += 1
            dims = []
            while self.peek(self.at) == "[":
                start = self.skip(self.at)
                end = self.closing(start, "[]")
                dims.append("".join(t.text for t in self.tokens[start + 1 : end]))
                self.at = end + 1
            inner = "".join(f"[{d}]" for d in dims[1:])
            made = f'metal::shared<{element}{inner}>({self.shared}, {dims[0] if dims else 1}, "{name.text}")'
            self.out.append(f"auto {name.text} = {made}; " if dims else f"auto& {name.text} = *{made}; ")
            self.shared += 1
            end_mark = self.peek(self.at)
            self.at = self.skip(self.at) + 1
            if end_mark == ";":
                return
            if end_mark != ",":
                raise self.error(f"threadgroup variable {name.text}: initialisers are not allowed", name.line)

    # -------------------------------------------------------------------------------------------------------- kernels
    def attribute(self) -> None:
        """``[[...]]`` outside a parameter list: ``[[kernel, max_total_threads_per_threadgroup(n)]]`` begins a kernel;
        ``[[unroll]]`` and the like go."""
        end = self.closing(self.at, "[]")
        text = "".join(t.text for t in self.tokens[self.at + 2 : end - 1])
        self.out.append(self.blanks(self.at, end + 1))
        self.at = end + 1
        if re.match(r"\s*kernel\b", text):
            limit = re.search(r"max_total_threads_per_threadgroup\s*\((\d+)\)", text)
            self.kernel(int(limit[1]) if limit else 1024)

    def kernel(self, max_threads: int = 1024) -> None:
        """``void name(parameters)``, behind what says that it is a kernel."""
        begin = self.at = self.skip(self.at)
        if self.depth:
            raise self.error("a kernel inside something else")
        if self.tokens[self.at].text != "void":
            raise self.error("a kernel must return void")
        self.at = self.skip(self.at + 1)
        name = self.tokens[self.at].text
        start = self.skip(self.at + 1)
        end = self.closing(start, "()")
        declared, texts = [], []
        for part in split(self.tokens[start + 1 : end]):
            parameter, text = self.checked(parse_parameter, name, part)
            declared.append(parameter)
            texts.append(text)
        self.checked(check_parameters, name, declared)
        self.kernels.append(KernelSignature(name, declared, max_threads))
        self.shared = 0
        self.out.append(f"static void {name}({', '.join(texts)}){self.blanks(begin, end)}")
        self.at = end + 1
        self.kernel_depth = self.depth


def translate(source: str, name: str = "kernel.metal", version: int = NEWEST) -> Translation:
    """MSL of a ``version`` to C++. :class:`MSLError` names the file, the line and what is outside the subset."""
    return Translator(source, name, version).run()
