"""Dtypes: names (as in the IR), numpy types, sizes and PyTorch's promotion rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from .errors import ConfigError

FLOAT8 = "float8_e4m3fn"  # 8 bits, no infinities; numbers above 464 become NaN
_OF_ML_DTYPES = ("bfloat16", FLOAT8)


@dataclass(frozen=True)
class DType:
    """One element type: ``kind`` is 'bool', 'int', 'uint', 'float' or 'complex'; ``ctype`` is its storage type in
    kernels."""

    name: str
    kind: str
    size: int
    ctype: str

    @property
    def numpy(self) -> np.dtype:
        """The numpy dtype (ml_dtypes' for bfloat16 and float8_e4m3fn)."""
        return np.dtype(getattr(ml_dtypes, self.name) if self.name in _OF_ML_DTYPES else self.name)


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("bool", "bool", 1, "bool8"),
        DType("uint8", "uint", 1, "uint8_t"),
        DType("int8", "int", 1, "int8_t"),
        DType("int16", "int", 2, "int16_t"),
        DType("int32", "int", 4, "int32_t"),
        DType("int64", "int", 8, "int64_t"),
        DType(FLOAT8, "float", 1, "e4m3"),
        DType("float16", "float", 2, "f16"),
        DType("bfloat16", "float", 2, "bf16"),
        DType("float32", "float", 4, "float"),
        DType("float64", "float", 8, "double"),
        DType("complex64", "complex", 8, ""),
        DType("complex128", "complex", 16, ""),
    )
}

_NUMPY_NAMES = {d.numpy: d.name for d in DTYPES.values()}


@cache
def numpy_dtype(name: str) -> np.dtype:
    """Return the numpy dtype of an IR name (bfloat16 and float8_e4m3fn are ml_dtypes')."""
    return DTYPES[name].numpy


def name_of(dtype: np.dtype) -> str:
    """Return the IR name of a numpy dtype; raises ``TypeError`` for a dtype that the IR does not have."""
    try:
        return _NUMPY_NAMES[np.dtype(dtype)]
    except KeyError:
        raise TypeError(f"numpy dtype {dtype} has no IR equivalent; use one of {', '.join(DTYPES)}") from None


def parse(value: object) -> str:
    """Return the IR name of 'float32', 'torch.float32', a torch or a numpy dtype; ``ValueError`` if unknown."""
    text = str(value).removeprefix("torch.")
    text = {"half": "float16", "float": "float32", "double": "float64", "long": "int64", "int": "int32"}.get(text, text)
    if text in DTYPES:
        return text
    raise ValueError(f"unknown dtype {value!r}; known: {', '.join(DTYPES)}")


STORAGE_DTYPES = ("float32", "float16", "bfloat16")
ACTIVATIONS = ("fp8",)  # types to which rows of activations can be quantised
KV_CACHES = {"int8": "int8", "fp8": FLOAT8}  # element types of KV caches, besides the dtype of the model
_SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def storage_dtype(value: Any) -> str:
    """Return the name of a dtype in which a program can store float32 tensors: one of ``STORAGE_DTYPES``.

    ``value``: its name, a common short one ('half', 'fp16', 'bf16'), a ``torch.dtype`` or a numpy dtype. Raises
    ``ConfigError`` for any other: casting weights to integers is not quantisation.
    """
    try:
        text = np.dtype(value).name if isinstance(value, type | np.dtype) else str(value)
        name = parse(_SHORT_NAMES.get(text, text))
    except (TypeError, ValueError):
        name = ""
    if name not in STORAGE_DTYPES:
        raise ConfigError(f"dtype {value!r}: float32 tensors can be stored as {', '.join(STORAGE_DTYPES)} only")
    return name


def is_float(name: str) -> bool:
    """Whether an IR dtype is a real floating type."""
    return DTYPES[name].kind == "float"


def extremes(name: str) -> tuple[float, float]:
    """Return the least and the greatest value of a real IR dtype. Those of floats are infinities, those of bool are
    False and True."""
    if is_float(name):
        return -math.inf, math.inf
    if name == "bool":
        return False, True
    info = np.iinfo(numpy_dtype(name))
    return int(info.min), int(info.max)


def is_int(name: str) -> bool:
    """Whether an IR dtype is a signed or unsigned integer type."""
    return DTYPES[name].kind in ("int", "uint")


def opmath(name: str) -> str:
    """Return the dtype of arithmetic on ``name``: narrow floats compute and accumulate in float32."""
    return "float32" if is_narrow(name) else name


def is_narrow(name: str) -> bool:
    """Whether ``name`` is a floating type of less than 32 bits, which is only stored: arithmetic is in float32."""
    return DTYPES[name].kind == "float" and DTYPES[name].size < 4


def accumulator(name: str) -> str:
    """Return the dtype of products and sums in a matmul or convolution of ``name``: int32 for 8-bit integers, else
    :func:`opmath`."""
    return "int32" if name in ("int8", "uint8") else opmath(name)


def multiply(a: str, b: str) -> bool:
    """Whether matmul and convolution have operands of these dtypes: equal ones, 8-bit integers of any sign, or rows of
    float8 numbers and a matrix of floats."""
    return a == b or {a, b} == {"int8", "uint8"} or (a == FLOAT8 and is_float(b))


_CATEGORY = {"bool": 0, "uint": 1, "int": 1, "float": 2, "complex": 3}


def promote(a: str, b: str) -> str:
    """Return PyTorch's ``promote_types`` of two dtypes, for tensors of one category (dimensioned or 0-d)."""
    if a == b:
        return a
    ka, kb = DTYPES[a].kind, DTYPES[b].kind
    if _CATEGORY[ka] != _CATEGORY[kb]:
        return a if _CATEGORY[ka] > _CATEGORY[kb] else b
    if ka == "float" or ka == "complex":
        if {a, b} == {"float16", "bfloat16"}:
            return "float32"
        return a if DTYPES[a].size > DTYPES[b].size else b
    if "uint8" in (a, b):  # uint8 with a signed type: the signed type that holds both
        other = b if a == "uint8" else a
        return "int16" if other == "int8" else other
    return a if DTYPES[a].size > DTYPES[b].size else b


def category(name: str) -> int:
    """Return 0 for bool, 1 for integers, 2 for floats, 3 for complex: a scalar changes a tensor's dtype only if its
    category is higher."""
    return _CATEGORY[DTYPES[name].kind]
