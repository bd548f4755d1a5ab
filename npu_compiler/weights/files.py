"""Sources of weights: a dict, a ``.safetensors`` file, a directory of shards, an ``.npz``.

A source gives the type of a tensor without reading it, and its elements. Tensors are read one by one, on request.
"""

from __future__ import annotations

import errno
import json
import lzma
import math
import mmap
import os
import stat
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np

from ..support import dtypes, npy
from ..support.errors import ConfigError, WeightError
from ..support.host_arrays import is_torch, to_array
from .format import BlockFormat, block_format

_MAX_HEADER = 100_000_000  # the limit of the format's own readers
_SAFETENSORS = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip
_MAX_ELEMENTS = 2**56  # empty dims counted as 1: numpy refuses a shape whose other dims overflow
MAX_DOCUMENT = 2**28  # bytes; the largest tokenizers have 2**25
AGAIN = "download or copy it again"
BLOCKS = "npusim.blocks"  # metadata: JSON of {weight: [format, columns, dtype]}, the tensors that are blocks
_FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E8M0")
_OTHER_SIZES = {"U16": 2, "U32": 4, "U64": 8, **dict.fromkeys(_FLOAT8, 1)}

Spec = tuple[tuple[int, ...], str]


class WeightSource(ABC):
    """Tensors by name. ``origin`` names the source in messages."""

    origin: str

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Return every tensor's name."""

    @abstractmethod
    def spec(self, name: str) -> Spec:
        """Return (shape, dtype name) of a tensor. Raises ``WeightError`` for a dtype that is not supported."""

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """Return a tensor, which may share memory with the source. Raises ``WeightError`` if it cannot be read."""

    def block_format(self, name: str) -> BlockFormat | None:
        """Return the weight format in whose blocks the source holds a matrix, or None."""
        return None

    @property
    def activations(self) -> str | None:
        """The type, one of ``dtypes.ACTIVATIONS``, to which the source says that rows of activations are quantised in
        front of its matrices; None: it does not say so."""
        return None

    def blocks(self, name: str, format: BlockFormat) -> np.ndarray | None:
        """Return a matrix [N, K] as blocks of a weight format, uint8 [N, bytes of a row], if the source holds it so,
        else None. It may share memory with the source."""
        return None


class TensorFiles(WeightSource):
    """Safetensors files, with the types of tensors as the files spell them."""

    @abstractmethod
    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return (dtype, shape) of a tensor, the dtype as the file spells it."""

    @abstractmethod
    def raw(self, name: str) -> np.ndarray:
        """Return a tensor as :meth:`read` does; numbers of 8-bit floating point types as their bytes, uint8."""


def open_weights(source: Any) -> WeightSource:
    """Return the source for a mapping of arrays (numpy or torch) or a path. Raises ``WeightError``."""
    if isinstance(source, WeightSource):
        return source
    if isinstance(source, Mapping):
        return _DictSource(source)
    if not isinstance(source, str | os.PathLike):
        raise WeightError(f"weights from a {type(source).__name__}: pass a dict of tensors or a path")
    path = Path(source)
    try:
        if path.is_dir():
            return _Shards(path, _shard_files(path))
        if path.name.endswith(".index.json"):
            return _Shards(path, _indexed_files(path))
        if path.suffix == ".npz":
            return _Npz(path)
        return SafetensorsFile(path)
    except OSError as error:
        raise WeightError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from None


class _DictSource(WeightSource):
    def __init__(self, tensors: Mapping[str, Any]):
        self.origin = "the dict"
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def spec(self, name: str) -> Spec:
        value = self._tensors[name]
        try:
            if is_torch(value):
                return tuple(value.shape), dtypes.parse(value.dtype)
            array = to_array(value)
            return array.shape, dtypes.name_of(array.dtype)
        except (TypeError, ValueError) as error:
            raise WeightError(f"weight {name!r}: {error}") from None

    def read(self, name: str) -> np.ndarray:
        try:
            return to_array(self._tensors[name])
        except (TypeError, ValueError, RuntimeError) as error:  # torch: sparse, quantised, on a lost device
            raise WeightError(f"weight {name!r} cannot be read as a dense array: {error}") from None


# -- safetensors ----------------------------------------------------------------------------------------------------
def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises ``OSError``, also for a FIFO, because opening it would wait for a writer."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return os.fdopen(handle, "rb")


def _is_pickle(data: mmap.mmap) -> bool:
    """Whether a file starts like those of torch.save: with a zip whose first member is a pickle, or with a pickle."""
    if data[:4] == b"PK\x03\x04":
        return b"data.pkl" in data[:512]
    return data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and any(data[4:8])


def read_document(path: Path) -> bytes:
    """Read a text or JSON file that comes with a model. Raises ``OSError``, also for one of more than ``MAX_DOCUMENT``
    bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_DOCUMENT:
            raise OSError(errno.EFBIG, f"it has {size} bytes; at most {MAX_DOCUMENT} are read", str(path))
        return file.read()


class SafetensorsFile(TensorFiles):
    """A safetensors file, mapped into memory. The whole header is checked before it is used.

    Reading instead of mapping would double the time of loading. A mapped file must not be shortened while its tensors
    are in use, or the system ends the process (SIGBUS). Programs that replace files by renaming, as downloads do, leave
    the old file intact. :meth:`read` checks that the file has not been written to.
    """

    def __init__(self, path: Path):
        self.origin = str(path)
        self._file = open_regular(path)
        self._opened = os.fstat(self._file.fileno())
        size = self._opened.st_size
        if size < 8:
            raise WeightError(f"{path}: offset {size}: the file ends within its header; {AGAIN}")
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        if _is_pickle(self._map):
            raise WeightError(
                f"{path} is a pickle as torch.save writes it, which can run code when it is read; convert it once: "
                "safetensors.torch.save_file({k: v.clone() for k, v in torch.load("
                f"{str(path)!r}, weights_only=True).items()}}, {str(path.with_suffix('.safetensors'))!r})"
            )
        length = int.from_bytes(self._map[:8], "little")
        if length > min(_MAX_HEADER, size - 8):
            detail = f"a header of {length} bytes does not fit a file of {size}"
            raise WeightError(f"{path}: offset 0: {detail}; it is not a safetensors file, or is truncated: {AGAIN}")
        self._start = 8 + length
        self._entries, self._blocks = _parse_header(self._map[8 : self._start], size - self._start, self.origin)

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def spec(self, name: str) -> Spec:
        dtype, shape, _ = self._entries[name]
        if (held := self._blocks.get(name)) is not None:
            return (shape[0], held.columns), held.dtype
        if dtype not in _SAFETENSORS:
            raise WeightError(f"{self.origin}: weight {name!r} has dtype {dtype}; convert it to one of {_listed()}")
        return shape, _SAFETENSORS[dtype]

    def read(self, name: str) -> np.ndarray:
        if (held := self._blocks.get(name)) is not None:
            elements = held.format.decode(self._array(name, self._entries[name][1], "uint8"), held.columns)
            return elements.astype(dtypes.numpy_dtype(held.dtype), copy=False)
        return self._array(name, *self.spec(name))

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self._entries[name][:2]

    def raw(self, name: str) -> np.ndarray:
        dtype, shape, _ = self._entries[name]
        return self._array(name, shape, "uint8") if dtype in _FLOAT8 else self.read(name)

    def block_format(self, name: str) -> BlockFormat | None:
        held = self._blocks.get(name)
        return None if held is None else held.format

    def blocks(self, name: str, format: BlockFormat) -> np.ndarray | None:
        held = self._blocks.get(name)
        if held is None or held.format is not format:
            return None
        return self._array(name, self._entries[name][1], "uint8")

    def _array(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        begin = self._entries[name][2]
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise WeightError(f"{self.origin}: the file was written to after it was opened; load the weights again")
        if 0 in shape:
            return np.empty(shape, dtypes.numpy_dtype(dtype))
        at = self._start + begin
        if dtype == "bool":  # a byte other than 0 and 1 is true, but no valid bool
            return np.asarray(np.frombuffer(self._map, np.uint8, math.prod(shape), at).reshape(shape) != 0)
        return np.frombuffer(self._map, dtypes.numpy_dtype(dtype), math.prod(shape), at).reshape(shape)


def _listed() -> str:
    return ", ".join(_SAFETENSORS)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is listed twice")
    return found


class _Blocks(NamedTuple):
    """A matrix that a file holds in the blocks of a weight format; ``dtype``: that of its elements."""

    format: BlockFormat
    columns: int
    dtype: str


def _parse_blocks(metadata: Any, entries: Mapping[str, tuple[str, tuple[int, ...], int]]) -> dict[str, _Blocks]:
    """Return the matrices in blocks that the metadata of a header lists. Raises ``ValueError`` if they do not fit."""
    text = metadata.get(BLOCKS) if isinstance(metadata, dict) else None
    table = json.loads(text) if isinstance(text, str) else {}
    if not isinstance(table, dict):
        raise ValueError("not an object")
    found = {}
    for name, value in table.items():
        dtype, shape, _ = entries.get(name, ("", (), 0))
        if not isinstance(value, list) or [type(v) for v in value] != [str, int, str]:
            raise ValueError(f"{name!r} is not a list of format, columns and dtype")
        format, columns, element = value
        held = _Blocks(block_format(format), columns, dtypes.storage_dtype(element))
        if dtype != "U8" or len(shape) != 2 or columns < 1 or held.format.row_bytes(columns) != shape[1]:
            raise ValueError(f"{name!r} is {dtype}{list(shape)}, not {columns} columns of {format}")
        found[name] = held
    return found


def _parse_header(
    text: bytes, data_size: int, origin: str
) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], dict[str, _Blocks]]:
    """Return the tensors of a header, name -> (dtype as the file spells it, shape, first byte of its data), and those
    of them that are blocks."""
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{origin}: offset 8: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise WeightError(f"{origin}: offset 8: the header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    entries, ranges = {}, []
    for name, entry in header.items():
        try:
            dtype, shape, begin, end = _parse_entry(entry, data_size)
        except ValueError as error:
            raise WeightError(f"{origin}: header of weight {name!r}: {error}") from None
        entries[name] = (dtype, shape, begin)
        ranges.append((begin, end, name))
    reached = 0
    for begin, end, name in sorted(ranges):
        if begin != reached:
            raise WeightError(f"{origin}: weight {name!r} starts at data byte {begin}, not {reached}: gap or overlap")
        reached = end
    if reached != data_size:
        raise WeightError(f"{origin}: {data_size} bytes of data, but the header accounts for {reached}")
    try:
        return entries, _parse_blocks(metadata, entries)
    except (ValueError, RecursionError, ConfigError) as error:
        raise WeightError(f"{origin}: metadata {BLOCKS!r}: {error}") from None


def _parse_entry(entry: Any, data_size: int) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("expected an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError("dtype is not text")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**48 for n in shape) or len(shape) > 32:
        raise ValueError("shape is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        raise ValueError("data_offsets is not a pair of numbers")
    begin, end = offsets
    if math.prod(max(n, 1) for n in shape) >= _MAX_ELEMENTS:
        raise ValueError(f"shape {shape} is too large")
    if not 0 <= begin <= end:
        raise ValueError(f"data_offsets {begin} to {end}")
    if end > data_size:
        raise ValueError(f"data_offsets {begin} to {end} of {data_size} bytes: the file is truncated; {AGAIN}")
    known = dtypes.DTYPES[_SAFETENSORS[dtype]].size if dtype in _SAFETENSORS else _OTHER_SIZES.get(dtype)
    if known is not None and end - begin != math.prod(shape) * known:
        raise ValueError(f"{end - begin} bytes for {dtype}{shape}")
    return dtype, tuple(shape), begin, end


class _Shards(TensorFiles):
    """Several safetensors files as one."""

    def __init__(self, origin: Path, files: list[Path]):
        self.origin = str(origin)
        self._home: dict[str, SafetensorsFile] = {}
        for path in files:
            shard = SafetensorsFile(path)
            for name in shard.names():
                if name in self._home:
                    raise WeightError(f"weight {name!r} is both in {self._home[name].origin} and in {shard.origin}")
                self._home[name] = shard

    def names(self) -> Iterable[str]:
        return self._home.keys()

    def spec(self, name: str) -> Spec:
        return self._home[name].spec(name)

    def read(self, name: str) -> np.ndarray:
        return self._home[name].read(name)

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self._home[name].header(name)

    def raw(self, name: str) -> np.ndarray:
        return self._home[name].raw(name)

    def block_format(self, name: str) -> BlockFormat | None:
        return self._home[name].block_format(name)

    def blocks(self, name: str, format: BlockFormat) -> np.ndarray | None:
        return self._home[name].blocks(name, format)


def _shard_files(folder: Path) -> list[Path]:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        return _indexed_files(indices[0])
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightError(f"{folder}: this directory holds no .safetensors file")
    return files


def _indexed_files(index: Path) -> list[Path]:
    """Return the shards that an index file lists."""
    try:
        table = json.loads(read_document(index).decode("utf-8"))["weight_map"]
        names = sorted({str(name) for name in table.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightError(f"{index}: not an index of shards (no 'weight_map'): {error}") from None
    if any(Path(name).name != name for name in names):
        raise WeightError(f"{index}: a shard lies outside of the index's directory")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise WeightError(f"{index} lists {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not there")
    return [index.parent / name for name in names]


# -- npz --------------------------------------------------------------------------------------------------------------
_BROKEN_ZIP = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, ValueError, LookupError, EOFError, OSError,
    RuntimeError, MemoryError,
)  # fmt: skip
_BFLOAT16 = np.dtype("V2")  # numpy's format cannot name it


class _Npz(WeightSource):
    """A numpy archive. :meth:`spec` reads the header of an array, :meth:`read` its data."""

    def __init__(self, path: Path):
        self.origin = str(path)
        self._headers: dict[str, npy.Header] = {}
        try:
            self._file = zipfile.ZipFile(path)
            members = [info for info in self._file.infolist() if not info.is_dir()]
            self._members = {info.filename.removesuffix(".npy"): info for info in members}
        except FileNotFoundError:
            raise
        except _BROKEN_ZIP as error:
            raise WeightError(f"{path}: not a readable .npz: {error}") from None
        if len(self._members) < len(members):
            raise WeightError(f"{path}: an array is listed twice")

    def names(self) -> Iterable[str]:
        return self._members.keys()

    def spec(self, name: str) -> Spec:
        if name not in self._headers:
            self._headers[name] = self._open(name, lambda stream, size: npy.read_header(stream))
        shape, _, dtype = self._headers[name]
        try:
            return shape, "bfloat16" if dtype == _BFLOAT16 else dtypes.name_of(dtype.newbyteorder("="))
        except TypeError as error:
            raise WeightError(f"{self.origin}: weight {name!r}: {error}") from None

    def read(self, name: str) -> np.ndarray:
        def load(stream: IO[bytes], size: int) -> np.ndarray:
            header = npy.read_header(stream)
            return npy.read_data(stream, header, size - stream.tell())

        array: np.ndarray = self._open(name, load)
        return array.view(dtypes.numpy_dtype("bfloat16")) if array.dtype == _BFLOAT16 else to_array(array)

    def _open(self, name: str, f: Callable[[IO[bytes], int], Any]) -> Any:
        """Return ``f`` of a member's stream and its size."""
        member = self._members[name]
        try:
            with self._file.open(member) as stream:
                return f(stream, member.file_size)
        except _BROKEN_ZIP as error:
            raise WeightError(f"{self.origin}: weight {name!r} is damaged: {error}") from None
