"""Weight formats: how the matrix of a product is stored, in how many bytes, and with which error.

A caller chooses a :class:`WeightFormat` by name: ``compile(weights="bf16c12")``. A *lossless* format restores every
bit; the graph does not mention it. A :class:`BlockFormat` replaces the elements of a row of the matrix by blocks of
bytes, within a stated error. In the graph that is a ``quantize`` node (elements to blocks) and a ``dequantize`` node
(blocks to elements), so that the graph states the numbers that the program computes with.

A *layout* is the order of a format's bytes for one kind of micro-kernel (:class:`Order`).
Every layout has one reader, the kernel code that loads its bytes into registers and decodes them there. The reader of a
format of this package is a file of the target named after the format (``targets/cpu/kernels/bf16c12.h``); that of
another format is the layout's ``reader``. A matrix is a weight [N, K]: N output columns, K the reduced dim.

Formats of this package are the modules of :mod:`npu_compiler.weights.formats`: each has a ``FORMAT``. Others are
registered with :func:`register_format`. docs/porting.md walks through one.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..support.errors import ConfigError

Shape = tuple[int, ...]

Read = Callable[[Any], Any]  # from the position of a byte to its value, an integer
Real = Callable[[Any], Any]  # from an integer to float32

PANEL = 32  # output columns of a panel of the CPU target, as in its kernels/storage.h
LOSSLESS = "bf16c12"  # changes no number
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_BUILT_IN = Path(__file__).with_name("formats")


class Order(Enum):
    """The kinds of micro-kernels that read weights."""

    PANELS = "panels"  # they compute a panel of output columns at once (``TargetConfig.panel``)
    ROWS = "rows"  # they read a weight row by row (``panel`` 0), as the SIMT kernels do


class Layout(ABC):
    """The bytes of a matrix in the order in which the micro-kernels of some targets read them.

    Attributes:
        name: 'FORMAT.LAYOUT', as kernels, recipes and artifacts refer to it.
        order: the kind of micro-kernels that read it.
        panel: output columns in one row of the packed array.
        alignment: the bytes of such a row are a multiple of it.
        max_rows: maximum rows of the left operand that the reader supports (None: any number). For a product of more
            rows, the target decodes the matrix in every run, or the program stores the elements as well.
        reader: the header with the reader, if it is not a file of the target.
    """

    name: str
    order: Order
    panel: int
    alignment: int = 64
    max_rows: int | None = None
    reader: Path | None = None

    @abstractmethod
    def packed_shape(self, n: int, c: int) -> Shape | None:
        """Return the shape of the packed uint8 array for [n, c], the argument of :meth:`pack`; None if the layout
        cannot hold it.

        Sizes depend only on shapes, so that memory is planned without the weights.
        """

    @abstractmethod
    def pack(self, stored: np.ndarray) -> np.ndarray:
        """Return the packed array, uint8 [..., bytes], of a matrix [N, K] (lossless formats: its elements; block
        formats: its blocks, uint8 [N, bytes of a row]). Raises ``IncompressibleError`` if these values do not fit."""

    @abstractmethod
    def unpack(self, packed: np.ndarray, n: int, c: int) -> np.ndarray:
        """Return the array [n, c] that :meth:`pack` packed."""

    def element(self, read: Read, real: Real, row: Any, column: Any, nbytes: int) -> Any:
        """Return element [row, column] of the matrix in float32, so that a kernel can look up rows of a table without
        a copy of it: ``read`` returns a byte of the row's panel, which has ``nbytes``. Called if :meth:`looks_up`.

        Positions are expressions (``graph.expr``) or integers of numpy, so only their operators are used."""
        raise NotImplementedError(f"{self.name} has no elements to look up")

    def looks_up(self, n: int, k: int) -> bool:
        """Whether :meth:`element` reads elements of a matrix [n, k]. By default, no layout does."""
        return False

    def check(self, packed: np.ndarray) -> None:
        """Raise ``ValueError`` if bytes of uint8 [..., bytes] would make a kernel read or write outside of its
        operands. It is called for packed weights that this process did not pack. By default, no bytes would."""
        return None


class WeightFormat(ABC):
    """A way to store the matrix of a product. This class is a lossless format; see :class:`BlockFormat` for others.

    ``name``: the name for callers ('-' counts as '_') and for the readers in C++. ``dtypes``: the element types of
    matrices that it stores. ``layouts``: one for each order that it has a reader for. ``required``: whether a matrix
    that cannot be stored is an error; otherwise the program stores its elements as they are. ``activations``: the type
    to which rows in front of its matrices may be rounded (``compile(activations=…)``), or None. ``code_dtype``: the
    dtype of its codes if a matrix unit can multiply rows of that type by them as they are stored, because a whole row
    of the matrix has one scale; else None.
    """

    name: str
    dtypes: tuple[str, ...]
    layouts: tuple[Layout, ...]
    required: bool = False
    activations: str | None = None
    code_dtype: str | None = None

    @property
    def lossless(self) -> bool:
        """Whether every element is restored bit by bit."""
        return True

    def layout(self, panel: int) -> Layout | None:
        """Return the layout for a target with this ``TargetConfig.panel``; None if such targets have no reader."""
        order = Order.PANELS if panel else Order.ROWS
        return next((x for x in self.layouts if x.order == order and x.panel == (panel or x.panel)), None)

    def stores(self, n: int, k: int, dtype: str) -> bool:
        """Whether a matrix [n, k] of this element type can be stored in the format, on every target that has a reader
        for it. A layout may still refuse a shape."""
        return dtype in self.dtypes and n > 0 and k > 0


class BlockFormat(WeightFormat):
    """A format that rounds: each row of a matrix becomes blocks of bytes.

    ``block``: the number of elements along K that share a scale, 0 for a whole row. The difference between an element
    and its decoded value is at most ``error`` times the largest magnitude of its block, plus ``floor``. ``gguf_type``:
    the type of GGUF tensors that consist of these blocks: they are packed as they are.
    """

    block: int = 0
    error: float
    floor: float = 0.0
    gguf_type: int | None = None

    @property
    def lossless(self) -> bool:
        return False

    @abstractmethod
    def row_bytes(self, k: int) -> int | None:
        """Return the bytes of the blocks of a row of ``k`` elements; None if such rows cannot be stored."""

    @abstractmethod
    def encode(self, w: np.ndarray) -> np.ndarray:
        """Return the blocks, uint8 [N, row_bytes(K)], of a matrix [N, K] of one of ``dtypes``. Raises
        ``IncompressibleError`` for values that the format cannot represent."""

    @abstractmethod
    def decode(self, blocks: np.ndarray, k: int) -> np.ndarray:
        """Return the matrix float32 [N, k] of blocks uint8 [N, row_bytes(k)]."""

    def stores(self, n: int, k: int, dtype: str) -> bool:
        return super().stores(n, k, dtype) and self.row_bytes(k) is not None


def layout_for(format: WeightFormat, panel: int, n: int, k: int, dtype: str) -> Layout | None:
    """Return the layout in which a target with this ``TargetConfig.panel`` stores a matrix [n, k]; None if it
    cannot."""
    layout = format.layout(panel) if format.stores(n, k, dtype) else None
    columns = format.row_bytes(k) if isinstance(format, BlockFormat) else k
    return layout if layout is not None and columns and layout.packed_shape(n, columns) is not None else None


# -- the registry -----------------------------------------------------------------------------------------------------
_registered: dict[str, WeightFormat] = {}


def register_format(format: WeightFormat) -> None:
    """Register a format that is not part of this package: from then on ``compile(weights=format.name)`` finds it and
    programs that use it can be loaded. Raises ``ConfigError`` for an invalid or duplicate name."""
    if not _NAME.fullmatch(format.name) or format.name in _built_in() or format.name == "none":
        raise ConfigError(f"{format.name!r} cannot name a weight format: it is taken or not like {_NAME.pattern}")
    for layout in format.layouts:
        where = f"layout {layout.name!r} of weight format {format.name!r}"
        if layout.name.partition(".")[0] != format.name:
            raise ConfigError(f"{where}: name it '{format.name}.…'")
        if not isinstance(layout.order, Order):
            raise ConfigError(f"{where}: its order is {layout.order!r}; it can be {', '.join(map(str, Order))}")
    _registered[format.name] = format


@cache
def _built_in() -> tuple[str, ...]:
    """Return the names of the modules of :mod:`npu_compiler.weights.formats`."""
    entries = (p for p in _BUILT_IN.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file())
    return tuple(sorted(p.stem for p in entries if _NAME.fullmatch(p.stem)))


def known_formats() -> list[str]:
    """Return the names of all formats: those of this package, then registered ones."""
    return [*_built_in(), *_registered]


def weight_format(name: str | None) -> WeightFormat | None:
    """Return a format by name, or None for None and 'none'. Raises ``ConfigError`` with the known names."""
    if name is None or name == "none":
        return None
    key = name.replace("-", "_") if isinstance(name, str) else name
    if key in _registered:
        return _registered[key]
    if key not in _built_in():
        raise ConfigError(f"unknown weight format {name!r}; known: {', '.join(known_formats())}, none")
    found: WeightFormat = import_module(f"{__package__}.formats.{key}").FORMAT
    return found


ALL_OTHERS = "*"
Weights = str | Mapping[str, str] | None  # a format, or formats by the name of a weight and of ALL_OTHERS


@dataclass(frozen=True)
class WeightFormats:
    """The formats of a model's matrices.

    ``own``: block formats by the name of a weight. ``default``: the format of all other matrices, or None.
    """

    default: WeightFormat | None = None
    own: Mapping[str, BlockFormat] = field(default_factory=dict)

    @classmethod
    def of(cls, weights: Weights) -> WeightFormats:
        """Return the formats that a caller named: one for all matrices, or a mapping from names of weights, with '*'
        for all others, to names of formats. Raises ``ConfigError`` for an unknown format, and for a lossless one that
        is not that of '*'."""
        if not isinstance(weights, Mapping):
            return cls(weight_format(weights))
        own: dict[str, BlockFormat] = {}
        for name, chosen in weights.items():
            if chosen is not None and not isinstance(chosen, str):
                what = f"weights[{name!r}] is a {type(chosen).__name__}"
                raise ConfigError(f"{what}, not the name of a format; tensors go to load_weights() of a built model")
            format = weight_format(chosen)
            if name != ALL_OTHERS:
                if not isinstance(format, BlockFormat):
                    raise ConfigError(f"weight {name!r}: a single weight takes a block format, not {chosen!r}")
                own[name] = format
        return cls(weight_format(weights.get(ALL_OTHERS)), own)

    def check_names(self, model: str, read: Collection[str], declared: Collection[str]) -> None:
        """Raise ``ConfigError`` if a weight with a format of its own is not one that ``model`` reads.

        ``read``: the keys of the weights that it reads. ``declared``: those of all its weights. Tied weights have
        several keys, of which one is read; the others may be given the same format.
        """
        chosen = {self.own[name].name for name in self.own.keys() & set(read)}
        for name in sorted(self.own.keys() - set(read)):
            if name in declared and self.own[name].name in chosen:
                continue
            near = difflib.get_close_matches(name, sorted(read))
            hint = (
                f"did you mean {' or '.join(map(repr, near))}?" if near else "its formats may name '*' for all others"
            )
            if name in declared:
                raise ConfigError(
                    f"weights: {model!r} does not read {name!r}; give the format to the first key of tied weights"
                )
            raise ConfigError(f"weights: {model!r} has no weight {name!r}; {hint}")

    def __iter__(self) -> Iterator[WeightFormat]:
        """Iterate over the formats."""
        yield from {f.name: f for f in (self.default, *self.own.values()) if f is not None}.values()


def find_layout(name: str) -> tuple[WeightFormat, Layout]:
    """Return the format and the layout of a layout's full name. Raises ``ValueError`` if the name is unknown."""
    owner = name.partition(".")[0]
    if "." in name and owner in known_formats():
        format = weight_format(owner)
        assert format is not None
        for layout in format.layouts:
            if layout.name == name:
                return format, layout
    raise ValueError(f"unknown weight layout {name!r}; weight formats: {', '.join(known_formats())} (register_format)")


def block_format(name: str) -> BlockFormat:
    """Return a block format by name. Raises ``ValueError`` if the name is unknown."""
    format = weight_format(name) if name in known_formats() else None
    if not isinstance(format, BlockFormat):
        raise ValueError(f"unknown block format {name!r}; weight formats: {', '.join(known_formats())}")
    return format


def registered_identities() -> list[str]:
    """Return the name of every format that is not part of this package and a digest of its files, for cache keys of
    what may hold weights in any of them. The keys have a digest of this package already."""
    return sorted(map(_identity, _registered.values()))


def _identity(format: WeightFormat) -> str:
    digest = hashlib.sha256()
    for file in sorted(set(_files(format))):
        digest.update(file.read_bytes())
    return f"{format.name} {digest.hexdigest()}"


def _files(format: WeightFormat) -> Iterator[Path]:
    """Yield the modules of a format and its layouts, and the readers."""
    for part in (format, *format.layouts):
        file = getattr(sys.modules.get(type(part).__module__), "__file__", None)
        if file is not None:
            yield Path(file)
    yield from (layout.reader for layout in format.layouts if layout.reader is not None)
