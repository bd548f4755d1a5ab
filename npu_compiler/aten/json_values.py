"""The JSON values of IR documents: checked primitives, node attributes and constants, in both directions.

Every check raises ``IRError`` that starts with ``path``, the JSON path of the value.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn, cast

import numpy as np

from ..support import dtypes
from ..support.errors import IRError
from ..support.records import show
from .data_dependent import number_inputs
from .ir import DataSize, Location
from .op_names import OWN_NAMESPACES, TEXT_ARGUMENTS
from .tensor_lists import MASKS, SIZES, complete_masks

MAX_NUMEL = 1 << 40  # far above any real tensor; below it, byte counts and offsets fit 64 bits
MAX_REPEATED_BYTES = 1 << 28  # of constants that are written as one repeated value: a few characters each
MAX_RANK = 64
MAX_ATTR_DEPTH = 16
INLINE_CONSTANT_NUMEL = 64  # larger constants are written as base64
_SIZE = re.compile(r"[A-Za-z0-9_+*/(), -]*[A-Za-z][A-Za-z0-9_+*/(), -]*")
_INT64 = range(-(1 << 63), 1 << 63)
_TORCH_SETTINGS = ("device", "layout", "memory_format")


def fail(path: str, message: str) -> NoReturn:
    """Raise ``IRError`` with the JSON path of the value."""
    raise IRError(f"{path}: {message}")


def as_mapping(value: Any, path: str) -> Mapping[str, Any]:
    """Return an object whose keys are strings."""
    if not isinstance(value, Mapping):
        fail(path, f"expected an object, got {show(value)}")
    for key in value:
        if not isinstance(key, str):
            fail(path, f"expected string keys, got {show(key)}")
    return value


def get(obj: Mapping[str, Any], key: str, path: str) -> Any:
    """Return the value under ``key``, which must be there."""
    if key not in obj:
        fail(path, f"missing key {key!r}")
    return obj[key]


def as_list(value: Any, path: str) -> list[Any] | tuple[Any, ...]:
    """Return a list or tuple."""
    if not isinstance(value, list | tuple):
        fail(path, f"expected a list, got {show(value)}")
    return value


def as_string(value: Any, path: str, *, empty: bool = False) -> str:
    """Return a string, which is not empty unless ``empty``."""
    if not isinstance(value, str) or not (value or empty):
        fail(path, f"expected a {'' if empty else 'non-empty '}string, got {show(value)}")
    return value


def as_natural(value: Any, path: str, hint: str = "") -> int:
    """Return an integer from 0 on; ``hint`` is appended to the message."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        fail(path, f"expected a non-negative integer, got {show(value)}{hint}")
    if value not in _INT64:
        fail(path, f"{show(value)} does not fit 64 bits")
    return int(value)


def as_shape(value: Any, path: str, *, static: bool = True) -> tuple[int, ...]:
    """Return the dimensions; unless ``static``, a string such as 'u0' is a data-dependent one."""
    hint = "; shapes must be static, export the model without dynamic dimensions"

    def dim(d: Any, where: str) -> int:
        if static or not isinstance(d, str):
            return as_natural(d, where, hint)
        if not _SIZE.fullmatch(d):
            fail(where, f"expected a number or an expression such as 'u0', got {show(d)}")
        return DataSize(d)

    dims = tuple(dim(d, f"{path}[{i}]") for i, d in enumerate(as_list(value, path)))
    if len(dims) > MAX_RANK:
        fail(path, f"rank {len(dims)} exceeds {MAX_RANK}")
    # Zero-size tensors too: their other dimensions still enter stride arithmetic.
    if math.prod(d for d in dims if d > 0) > MAX_NUMEL:
        fail(path, f"{show(str(list(dims)))} exceeds {MAX_NUMEL} elements")
    return dims


def as_dtype(value: Any, path: str) -> str:
    """Return the IR name of a dtype, with or without the ``torch.`` prefix."""
    if not isinstance(value, str) and type(value).__module__ != "torch":
        fail(path, f"expected a dtype name such as 'float32', got {show(value)}")
    try:
        return dtypes.parse(value)
    except ValueError as e:
        raise IRError(f"{path}: {e}") from e


def describe(shape: tuple[int, ...], dtype: str) -> str:
    """Spell a type for a message: ``float32[2, 3]``."""
    return f"{dtype}{list(shape)}"


# ----------------------------------------------------------------------------------------------------------- attributes


def read_attrs(raw: Any, path: str) -> dict[str, Any]:
    """Return node attributes as plain Python values: None, bool, int, float, str, and lists and dicts of them."""
    return {k: _attr(v, k, f"{path}.{k}") for k, v in as_mapping(raw, path).items()}


def _attr(value: Any, key: str, path: str, depth: int = 0) -> Any:
    """Return a plain Python value; ``key`` decides the meaning of a string or a torch object."""
    if depth > MAX_ATTR_DEPTH:
        fail(path, f"nested more than {MAX_ATTR_DEPTH} levels deep")
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", *_TORCH_SETTINGS):
        return as_dtype(value, path) if kind.__name__ == "dtype" else str(value).removeprefix("torch.")
    if key in ("dtype", "out_dtype"):
        return None if value is None else as_dtype(value, path)
    if isinstance(value, np.generic):  # before float: numpy.float64 is one
        value = value.item()
    if isinstance(value, str):
        bare = value.removeprefix("torch.")
        return bare if bare in dtypes.DTYPES or key in _TORCH_SETTINGS else value
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        if value not in _INT64:
            fail(path, f"integer {show(value)} does not fit 64 bits")
        return int(value)
    if isinstance(value, list | tuple):
        return [_attr(v, "", f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        return {k: _attr(v, k, f"{path}.{k}", depth + 1) for k, v in as_mapping(value, path).items()}
    if kind.__module__.startswith("torch.fx"):
        fail(path, "the extractor lost a tensor that is passed by keyword; extract the model with npu_compiler.capture")
    fail(path, f"expected a number, string, boolean, null or list, got {show(value)}")


def check_texts(op_type: str, attrs: dict[str, Any], path: str) -> None:
    """Check that PyTorch's own ops have text only where they take it: elsewhere, as in "1.5", it is a quoted number."""
    if op_type.partition(".")[0] in OWN_NAMESPACES:
        for key, value in attrs.items():
            if key not in TEXT_ARGUMENTS and key not in _TORCH_SETTINGS:
                _refuse_texts(value, f"{path}.{key}")


def _refuse_texts(value: Any, path: str) -> None:
    if isinstance(value, str) and value not in dtypes.DTYPES:
        fail(path, f"expected a number, boolean, null or list, got the text {show(value)}; numbers have no quotes")
    if isinstance(value, list):
        for i, inner in enumerate(value):
            _refuse_texts(inner, f"{path}[{i}]")


def check_numbers(attrs: dict[str, Any], inputs: int, path: str) -> None:
    """Check that every ``{"number": i}`` in the attributes refers to one of the node's ``inputs``."""
    for index in number_inputs(attrs):
        if as_natural(index, path) >= inputs:
            fail(path, f"refers to input {index} as a number, but the node has {inputs} input(s)")


def check_tensor_lists(attrs: dict[str, Any], inputs: int, path: str) -> None:
    """Check that the attributes that describe lists of tensors fit each other and the number of tensor ``inputs``."""
    sizes = as_list(attrs.get(SIZES, []), f"{path}.{SIZES}")
    total = sum(as_natural(n, f"{path}.{SIZES}[{i}]") for i, n in enumerate(sizes))
    if total > inputs:
        fail(f"{path}.{SIZES}", f"the lists hold {total} tensors, but the node has {inputs} input(s)")
    masks = as_list(attrs.get(MASKS, []), f"{path}.{MASKS}")
    if len(masks) > len(sizes):
        fail(f"{path}.{MASKS}", f"{len(masks)} masks for {len(sizes)} tensor list(s)")
    for i, mask in enumerate(masks):
        where = f"{path}.{MASKS}[{i}]"
        if not all(isinstance(m, bool) for m in as_list(mask, where)):
            fail(where, "expected a list of booleans")
    try:
        complete_masks(sizes, masks)
    except ValueError as error:
        fail(f"{path}.{MASKS}", str(error))


# ------------------------------------------------------------------------------------------------------------ constants


def read_location(raw: Any, path: str) -> Location | None:
    """Return where a node comes from, or None if the document does not tell."""
    if raw is None:
        return None
    texts = as_mapping(raw, path)
    names = [f.name for f in fields(Location)]
    return Location(*(as_string(texts.get(name, ""), f"{path}.{name}", empty=True) for name in names))


def read_constant(obj: Mapping[str, Any], path: str, declared: tuple[int, ...] | None) -> np.ndarray:
    """Return the array of ``{data, dtype}``, ``{data_b64, shape, dtype}`` or ``{fill, shape, dtype}``."""
    dtype = as_dtype(get(obj, "dtype", path), f"{path}.dtype")
    if "data" in obj:
        value = _from_nested(obj["data"], dtype, f"{path}.data")
        empty = value.size == 0 and declared is not None and 0 in declared
        return value.reshape(cast("tuple[int, ...]", declared)) if empty else value  # [] stands for [0, 3] too
    shape = as_shape(get(obj, "shape", path), f"{path}.shape")
    if "fill" in obj:
        value = _from_nested(obj["fill"], dtype, f"{path}.fill")
        if value.shape != ():
            fail(f"{path}.fill", "expected one number")
        return np.broadcast_to(value, shape)
    where = f"{path}.data_b64"
    try:
        raw = base64.b64decode(as_string(get(obj, "data_b64", path), where, empty=True), validate=True)
    except (binascii.Error, ValueError) as e:
        raise IRError(f"{where}: not base64: {e}") from e
    need = math.prod(shape) * dtypes.DTYPES[dtype].size
    if len(raw) != need:
        fail(where, f"holds {len(raw)} bytes, {describe(shape, dtype)} needs {need}")
    if dtype == "bool" and any(b > 1 for b in raw):
        fail(where, "a bool must be byte 0 or 1")
    return np.frombuffer(raw, dtypes.numpy_dtype(dtype)).reshape(shape).copy()


def _from_nested(data: Any, dtype: str, path: str) -> np.ndarray:
    """Convert a number or nested list to ``dtype``; a value that the dtype cannot hold is an error."""
    try:
        wide = np.array(data)
    except (ValueError, TypeError, OverflowError, RecursionError) as e:
        raise IRError(f"{path}: not a regular nested list of numbers") from e
    target = dtypes.DTYPES[dtype]
    accepted = {"bool": "b", "int": "biu", "uint": "biu", "float": "biuf", "complex": "biufc"}[target.kind]
    if wide.size and wide.dtype.kind not in accepted:
        fail(path, f"expected numbers of dtype {dtype}, got {show(str(wide.dtype))} values")
    if wide.size and target.kind in ("int", "uint"):
        info = np.iinfo(target.numpy)
        if int(wide.min()) < info.min or int(wide.max()) > info.max:
            fail(path, f"value out of range for {dtype}")
    with np.errstate(over="ignore"):
        value = wide.astype(target.numpy)
    if wide.dtype.kind in "iufc" and target.kind in ("float", "complex"):
        lost = np.isfinite(wide) & ~np.isfinite(value)
        if bool(np.any(lost)):
            fail(path, f"value out of range for {dtype}")
    return value


def constant_to_dict(value: np.ndarray) -> dict[str, Any]:
    """Return the JSON form of an array, which ``read_constant`` reads back bit for bit.

    Small arrays are lists, uniform ones a repeated value, others base64.
    """
    dtype = dtypes.name_of(value.dtype)
    real = not np.iscomplexobj(value)
    if value.size <= INLINE_CONSTANT_NUMEL and real and (value.size or value.ndim == 1):
        return {"data": value.tolist(), "dtype": dtype}
    head: dict[str, Any] = {"shape": list(value.shape), "dtype": dtype}
    raw = value.tobytes()
    if real and value.size and raw == raw[: value.itemsize] * value.size:
        return {**head, "fill": value.flat[0].item()}
    return {**head, "data_b64": base64.b64encode(raw).decode("ascii")}
