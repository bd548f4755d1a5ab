"""GGUF files: metadata and tensors, and the config.json that corresponds to the metadata.

The header is read here, in one pass over the mapped file. The package ``gguf`` dequantises blocks of types without a
weight format; it is imported for such tensors. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...support import dtypes
from ...support.errors import ConfigError, WeightError
from ...support.records import show
from ...weights.files import AGAIN, Spec, WeightSource, open_regular
from ...weights.format import BlockFormat, known_formats, weight_format
from .family import by_architecture
from .keys import Keys, unsupported

__all__ = ["GGUFFile", "hf_config"]

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_PLAIN = {0: "float32", 1: "float16", 28: "float64", 30: "bfloat16"}  # tensor types other than quantised blocks
_MAX_DIMS, _MAX_DIM = 4, 2**48
_MAX_ALIGNMENT = 2**20
_OTHER = "convert the model to another type"
_MAX_BYTES, _MAX_ITEMS = 2**28, 2**24  # of a text, of an array: far above any vocabulary


@dataclass(frozen=True)
class _Entry:
    shape: tuple[int, ...]
    kind: int
    begin: int


class _Cursor:
    """A position in the header. Methods raise ``WeightError`` at the end of the file."""

    def __init__(self, data: mmap.mmap, origin: str):
        self.data, self.origin, self.at = data, origin, 0

    def fail(self, message: str) -> WeightError:
        return WeightError(f"{self.origin}: offset {self.at}: {message}")

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise self.fail(f"the file ends within its header; it is truncated: {AGAIN}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        size: int = self.number("<Q")
        if size > _MAX_BYTES:
            raise self.fail(f"a text of {size} bytes; the file is damaged: {AGAIN}")
        return self.take(size).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            value = self.number(_SCALARS[kind])
            return float(str(np.float32(value))) if kind == _FLOAT32 else value  # the shortest decimal, such as 1e-05
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.fail(f"metadata type {kind} is unknown")
        inner, count = self.number("<I"), self.number("<Q")
        if count > _MAX_ITEMS:
            raise self.fail(f"an array of {count} elements; the file is damaged: {AGAIN}")
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner])
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        if inner != _STRING:
            raise self.fail(f"arrays of metadata type {inner} are not supported")
        return [self.text() for _ in range(count)]


class GGUFFile(WeightSource):
    """A GGUF file, mapped into memory. ``read`` dequantises to float32.

    Attributes:
        metadata: key -> value; arrays are lists.

    Raises:
        WeightError: the file is truncated or malformed.
    """

    def __init__(self, path: Path):
        self.origin = str(path)
        try:
            with open_regular(path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise WeightError(f"{path}: the file is empty") from None
        except OSError as error:
            raise WeightError(f"{path}: cannot be read: {error.strerror or error}") from None
        cursor = _Cursor(self._map, self.origin)
        if cursor.take(4) != b"GGUF":
            raise WeightError(f"{path}: offset 0: not a GGUF file")
        version = cursor.number("<I")
        if version not in (2, 3):
            raise WeightError(f"{path}: offset 4: GGUF version {version} is not supported; convert it to version 3")
        tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.text()
            if key in self.metadata:
                raise cursor.fail(f"{show(key)} is listed twice")
            self.metadata[key] = cursor.value(cursor.number("<I"))
        self._formats = _block_types()
        self._entries = self._read_entries(cursor, tensors)

    def _read_entries(self, cursor: _Cursor, count: int) -> dict[str, _Entry]:
        found: dict[str, _Entry] = {}
        for _ in range(count):
            name, rank = cursor.text(), cursor.number("<I")
            if name in found:
                raise cursor.fail(f"tensor {show(name)} is listed twice")
            if not 0 < rank <= _MAX_DIMS:
                raise cursor.fail(f"tensor {show(name)} has {rank} dims")
            shape = tuple(cursor.number("<Q") for _ in range(rank))[::-1]
            if not all(0 < n < _MAX_DIM for n in shape):
                raise cursor.fail(f"tensor {show(name)} has the shape {list(shape)}")
            found[name] = _Entry(shape, cursor.number("<I"), cursor.number("<Q"))
        unit = Keys(self.metadata, self.origin).integer("general.alignment", 32, high=_MAX_ALIGNMENT)
        start = -(-cursor.at // unit) * unit
        for name, e in found.items():
            size = self._at_least(e)
            if size is None:
                detail = f"rows of {e.shape[-1]} elements, which are not whole blocks of {self._formats[e.kind].name}"
                raise WeightError(f"{self.origin}: {show(name)} has {detail}; the file is damaged: {AGAIN}")
            end = start + e.begin + size
            if end > len(self._map):
                what = f"tensor {show(name)} ends at byte {end} of {len(self._map)}"
                raise WeightError(f"{self.origin}: {what}; the file is truncated: {AGAIN}")
            found[name] = _Entry(e.shape, e.kind, start + e.begin)
        return found

    def _at_least(self, e: _Entry) -> int | None:
        """Return the bytes of a tensor, None if its rows do not consist of whole blocks. For types without a weight
        format it is a lower bound: each has at least one bit per element."""
        count = math.prod(e.shape)
        if e.kind in _PLAIN:
            return count * dtypes.DTYPES[_PLAIN[e.kind]].size
        if (format := self._formats.get(e.kind)) is None:
            return count // 8
        row_bytes = format.row_bytes(e.shape[-1])
        return None if row_bytes is None else count // e.shape[-1] * row_bytes

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def spec(self, name: str) -> Spec:
        e = self._entries[name]
        if e.kind not in _PLAIN and e.kind not in self._formats:
            self._foreign(name)  # refuses unknown types
        return e.shape, _PLAIN.get(e.kind, "float32")

    def block_format(self, name: str) -> BlockFormat | None:
        e = self._entries[name]
        return self._formats.get(e.kind) if len(e.shape) == 2 else None

    def blocks(self, name: str, format: BlockFormat) -> np.ndarray | None:
        e = self._entries[name]
        return self._raw(e, format) if e.kind == format.gguf_type and len(e.shape) == 2 else None

    def _raw(self, e: _Entry, format: BlockFormat) -> np.ndarray:
        """Return the blocks of a tensor, uint8 [rows, bytes of a row]."""
        row_bytes = format.row_bytes(e.shape[-1])
        assert row_bytes is not None  # _read_entries has checked it
        rows = math.prod(e.shape[:-1])
        return np.frombuffer(self._map, np.uint8, rows * row_bytes, e.begin).reshape(rows, row_bytes)

    def is_quantised(self, name: str) -> bool:
        """Return True if the tensor is stored in quantised blocks."""
        return self._entries[name].kind not in _PLAIN

    def read(self, name: str) -> np.ndarray:
        e = self._entries[name]
        if e.kind in _PLAIN:
            dtype = dtypes.numpy_dtype(_PLAIN[e.kind])
            return np.frombuffer(self._map, dtype, math.prod(e.shape), e.begin).reshape(e.shape)
        if (format := self._formats.get(e.kind)) is not None:
            return format.decode(self._raw(e, format), e.shape[-1]).reshape(e.shape)
        kind, block, size = self._foreign(name)
        from gguf.quants import dequantize

        try:
            rows, columns = math.prod(e.shape[:-1]), e.shape[-1]
            if columns % block:
                raise ValueError(f"rows of {columns} elements are not a multiple of blocks of {block}")
            raw = np.frombuffer(self._map, np.uint8, rows * (columns // block) * size, e.begin)
            return np.asarray(dequantize(raw.reshape(rows, -1), kind), np.float32).reshape(e.shape)
        except (NotImplementedError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise WeightError(f"{self.origin}: tensor {show(name)} of GGUF type {e.kind}: {error}; {_OTHER}") from None

    def _foreign(self, name: str) -> tuple[Any, int, int]:
        """Return the type of a tensor that only the package ``gguf`` decodes, and the elements and bytes of a block.

        Raises:
            WeightError: the package is missing or does not know the type.
        """
        kind = self._entries[name].kind
        try:
            from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        except ImportError:
            advice = f"tensor {show(name)} of GGUF type {kind} needs the package gguf: pip install 'npusim[llm]'"
            raise WeightError(f"{self.origin}: {advice}") from None
        try:
            found = GGMLQuantizationType(kind)
            return found, *GGML_QUANT_SIZES[found]
        except (ValueError, LookupError):
            known = ", ".join([*_PLAIN.values(), *(f.name for f in self._formats.values())])
            what = f"GGUF type {kind} is unknown; known are {known} and those of the package gguf"
            raise WeightError(f"{self.origin}: tensor {show(name)}: {what}; {_OTHER}") from None


def _block_types() -> dict[int, BlockFormat]:
    """Return the weight formats whose blocks are those of a GGUF type, by the type's number."""
    formats = [f for name in known_formats() if isinstance(f := weight_format(name), BlockFormat)]
    return {f.gguf_type: f for f in formats if f.gguf_type is not None}


# ------------------------------------------------------------------------------------------------------------- config

# Our keys of settings, by key of the metadata without the architecture.
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_NUMBERS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "rms_norm_eps",
    "attention.scale": "attention_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_scale",
    "residual_scale": "residual_scale",
    "logit_scale": "logit_scale",
    "rope.freq_base": "rope_theta",
}
_FLAGS = {"use_parallel_residual": "use_parallel_residual"}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Return the ``config.json`` that corresponds to the file's metadata. Quantised models compute in bfloat16.

    Raises:
        ConfigError: the architecture or a setting is not supported.
    """
    metadata = file.metadata
    architecture = Keys(metadata).text("general.architecture")
    family, gguf = by_architecture(architecture)
    names, begin = set(file.names()), f"{architecture}."
    own = Keys({k.removeprefix(begin): v for k, v in metadata.items() if k.startswith(begin)}, architecture)
    config: dict[str, Any] = {name: own.integer(k, low=0) for k, name in _SIZES.items() if own.has(k)}
    config |= {name: own.number(k, zero=True) for k, name in _NUMBERS.items() if own.has(k)}
    config |= {name: own.flag(k) for k, name in _FLAGS.items() if own.has(k)}
    if own.has("attention.value_length") and own.integer("attention.value_length") != config.get("head_dim"):
        raise ConfigError(f"{own.at('attention.value_length')} differs from key_length, which is not supported")
    if own.integer("expert_count", 0, low=0):
        raise unsupported(own.at("expert_count"), own.integer("expert_count"), "layers have one MLP here")
    config["model_type"] = family.model_type
    config["vocab_size"] = own.integer("vocab_size") if own.has("vocab_size") else None
    if "token_embd.weight" in names:
        config["vocab_size"] = file.spec("token_embd.weight")[0][0]
    config["tie_word_embeddings"] = "output.weight" not in names
    config |= {setting: tensor in names for setting, tensor in gguf.present.items()}
    config["dtype"] = _dtype(file, "blk.0.ffn_down.weight")
    config["rope_parameters"] = _rope(file, own, config)
    config |= gguf.complete(config)
    return {family.aliases.get(key, key): value for key, value in config.items()}


def _dtype(file: GGUFFile, name: str) -> str:
    if name not in file.names() or file.is_quantised(name):
        return "bfloat16"
    return file.spec(name)[1]


def _rope(file: GGUFFile, own: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = own.text("rope.scaling.type", "none")
    names = set(file.names())
    rope: dict[str, Any] = {}
    if "rope_factors_long.weight" in names:
        if "rope_factors_short.weight" not in names:
            raise WeightError(f"{file.origin} lacks 1 tensor(s): 'rope_factors_short.weight'")
        factors = {f"{x}_factor": file.read(f"rope_factors_{x}.weight").tolist() for x in ("short", "long")}
        rope = {"rope_type": "longrope", **factors}
        if own.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = own.number("rope.scaling.attn_factor")
    elif "rope_freqs.weight" in names:  # the divisors that llama3's formula gives
        divisors = file.read("rope_freqs.weight").tolist()
        rope = {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
    elif scaling != "none":
        rope = {"rope_type": scaling, "factor": own.number("rope.scaling.factor")}
    if "original_max_position_embeddings" in config:
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // max(config.get("num_attention_heads", 1), 1)
    turning = own.integer("rope.dimension_count", head_dim, low=0)
    if turning != head_dim:
        rope["partial_rotary_factor"] = turning / max(head_dim, 1)
    return rope
