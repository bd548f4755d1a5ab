"""The records of a profile, which every view shows."""

from __future__ import annotations

from dataclasses import dataclass

DEVICES = ("npu", "host", "transfer")


@dataclass(frozen=True)
class Place:
    """A module of the model and the line of code that calls it; see ``npu_compiler.aten.ir.Location``."""

    module: str
    kind: str
    source: str


@dataclass(frozen=True)
class KernelError:
    """The error of a kernel's results against float64 with the same inputs. ``rms``: root mean square, relative to that
    of the results; ``largest``: relative to the largest result; ``note``: why there is none."""

    rms: float | None = None
    largest: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A kernel ('npu'), an op that PyTorch runs ('host') or a copy between them ('transfer').

    Attributes:
        part: the number of the step of the plan, 0 for a program of its own.
        seconds, least: the median and the least of the runs.
        start, end: seconds since the start of the run that the timeline shows.
        flops, read, written: operations, and bytes of distinct elements.
        roof: seconds that the device needs at least; 0 if that is unknown. ``bound``: by 'memory' or 'compute'.
        dtype: of what is multiplied. ``inputs``, ``outputs``: tensors in words.
        ops: the nodes of the IR. ``text``: the formula. ``launch``: threads of a GPU.
        after: the rows whose results it reads, by index. ``before``: seconds in an earlier profile that this one is
            compared with; None if it is not, or had no such row.
    """

    index: int
    name: str
    device: str
    kind: str
    part: int
    seconds: float
    least: float
    start: float
    end: float
    flops: int = 0
    read: int = 0
    written: int = 0
    roof: float = 0.0
    bound: str = ""
    dtype: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()
    text: str = ""
    launch: str = ""
    after: tuple[int, ...] = ()
    before: float | None = None
    error: KernelError | None = None

    @property
    def lost(self) -> float:
        """Seconds above the device's minimum: all seconds of a transfer or a host op; 0 if the minimum is unknown."""
        if self.device != "npu":
            return self.seconds
        return max(0.0, self.seconds - self.roof) if self.roof else 0.0

    @property
    def of_roof(self) -> float:
        """The least time over the time taken: 1 is the roofline; 0 if that is unknown."""
        return self.roof / self.seconds if self.seconds > 0 else 0.0

    @property
    def gflops(self) -> float:
        """GFLOP/s."""
        return self.flops / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def gbytes(self) -> float:
        """GB/s."""
        return (self.read + self.written) / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def module(self) -> str:
        """The modules as text."""
        return ", ".join(dict.fromkeys(p.module or p.kind for p in self.places))


@dataclass(frozen=True)
class Block:
    """A buffer of an arena: its place in bytes, and the first and the last kernel that access it."""

    name: str
    tensor: str
    offset: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Arena:
    """The arena of a program. ``peak``: the kernel at which most bytes are in use, and ``owners`` the blocks that are
    alive then, the largest first, by position in ``blocks``. ``rows``: the numbers of its kernels among all rows."""

    name: str
    nbytes: int
    blocks: tuple[Block, ...]
    peak: int
    live: int
    owners: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """A buffer that stays: a 'weight', a 'const' or a 'state'. ``format``: its weight format, if it has one."""

    name: str
    kind: str
    tensor: str
    nbytes: int
    format: str = ""


@dataclass(frozen=True)
class Section:
    """One entry point of a program, or one plan.

    ``seconds``: the median of runs in which each step is timed; ``whole``: of runs in which no step is timed.
    ``count``: the number of such runs that ``title`` consists of. ``before``: the sum of the medians of all rows in an
    earlier profile.
    """

    name: str
    title: str
    runs: int
    seconds: float
    whole: float
    rows: tuple[Row, ...]
    arenas: tuple[Arena, ...]
    count: int = 1
    before: float | None = None

    @property
    def kernel_seconds(self) -> float:
        """The sum of the medians of all rows."""
        return sum(r.seconds for r in self.rows)

    @property
    def roof(self) -> float:
        """Seconds that all kernels need at least."""
        return sum(r.roof for r in self.rows)

    @property
    def of_roof(self) -> float:
        """The least time of the kernels over the sum of the medians; 0 if that is unknown."""
        return self.roof / self.kernel_seconds if self.rows else 0.0

    @property
    def flops(self) -> int:
        """Operations of all kernels."""
        return sum(r.flops for r in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes that kernels read and write."""
        return sum(r.read + r.written for r in self.rows if r.device == "npu")


@dataclass(frozen=True)
class Limits:
    """The roofline of the device: FLOP/s by dtype, and bytes per second of its caches (bytes, rate) and its memory."""

    flops: dict[str, float]
    caches: tuple[tuple[float, float], ...]
    memory: float
    source: str


@dataclass(frozen=True)
class NotOnNPU:
    """A node that PyTorch runs on the host, and why."""

    node: str
    op: str
    reason: str
    fix: str
    places: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Profile:
    """The measurements: one section for each entry point, and the data that they share."""

    model: str
    target: str
    device: str
    machine: str
    dtype: str
    version: str
    created: str
    sections: tuple[Section, ...]
    held: tuple[Held, ...] = ()
    limits: Limits | None = None
    not_on_npu: tuple[NotOnNPU, ...] = ()
    notes: tuple[str, ...] = ()
