"""Packed weights: bytes, headers with checksums that fit, and bytes of weights that kernels follow. What is accepted
runs, and must not crash."""

from __future__ import annotations

import copy
import io
import random
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from npu_compiler import load_ir
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.pipeline import compile_entries
from npu_compiler.support import dtypes
from npu_compiler.weights.files import open_regular
from npu_compiler.weights.formats.bf16c12.panels import max_outliers, panel_bytes
from npu_runtime import CPUBackend, Executor
from npu_runtime.arrays import SLAB
from npu_runtime.packed_weights import read_packed, write_packed
from npu_runtime.weight_loader import load_weights

from ..mutations import INTEGERS, mutate_bytes, mutate_tree

_IR = Path(__file__).parents[2] / "data" / "ir" / "mlp.json"
_PREFIX = 20


@cache
def _program() -> CompiledProgram:
    return compile_entries({"main": load_ir(_IR)}, dtype="bfloat16", weights="bf16c12")


@cache
def _backend() -> CPUBackend:
    return CPUBackend(1)


@cache
def _file() -> bytes:
    rng, program = np.random.default_rng(0), _program()
    assert any(b.format == "bf16c12.panels" for b in program.buffers)
    tensors = {w.key: rng.standard_normal(w.shape).astype(w.dtype) for w in program.weights}
    file = io.BytesIO()
    write_packed(file, "key", load_weights(program, tensors, _backend()), program)
    return file.getvalue()


def _parts() -> tuple[Any, bytearray]:
    data = _file()
    length = int.from_bytes(data[8:16], "little")
    begin = -(-(_PREFIX + length) // 64) * 64
    return msgpack.unpackb(data[_PREFIX : _PREFIX + length]), bytearray(data[begin:])


def _forged(rng: random.Random) -> bytes:
    """Another header or body, and checksums that fit."""
    header, body = copy.deepcopy(_parts())
    if rng.random() < 0.4:
        for _ in range(rng.choice((1, 1, 2))):
            mutate_tree(rng, header, ("uint8", "bf16c12.panels", "bf16c12.rows4", "", 0, 64))
    else:
        for _ in range(rng.choice((1, 2, 8))):
            _damage_weights(rng, header, body)
    if rng.random() < 0.9 and "sums" in header:
        slabs = range(0, len(body), SLAB)
        header["sums"] = b"".join(zlib.crc32(body[at : at + SLAB]).to_bytes(4, "little") for at in slabs)
    packed = msgpack.packb(header)
    prefix = b"NPUWGHT2" + len(packed).to_bytes(8, "little") + zlib.crc32(packed).to_bytes(4, "little") + packed
    return prefix.ljust(-(-len(prefix) // 64) * 64, b"\0") + body


def _damage_weights(rng: random.Random, header: Any, body: bytearray) -> None:
    """A number of outliers, a place of one, or any bit."""
    _, _, shape, offset, format = rng.choice(header["buffers"])
    if format and rng.random() < 0.8:
        panel = offset + rng.randrange(shape[-2]) * shape[-1]
        k = next(k for k in range(8, 1000, 8) if panel_bytes(k) == shape[-1])
        place = 64 + 48 * k + 8 * rng.randrange(max_outliers(k))
        at = panel + rng.choice((16, place))
        number = rng.choice((rng.choice(INTEGERS), rng.randrange(40), rng.randrange(32 * k), 32 * k))
        body[at : at + 4] = (number % 2**32).to_bytes(4, "little")
    else:
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)


def case(rng: random.Random, folder: Path) -> None:
    path = folder / "packed"
    unlikely = rng.random() < 0.3
    try:
        path.write_bytes(mutate_bytes(rng, _file()) if unlikely else _forged(rng))
    except (OverflowError, TypeError, ValueError):  # what msgpack cannot hold is in no file
        return
    store = read_packed(open_regular(path), "key", _backend()).store(_program())
    if unlikely:
        length = int.from_bytes(_file()[8:16], "little")
        padding = slice(_PREFIX + length, -(-(_PREFIX + length) // 64) * 64)
        found, expected = bytearray(path.read_bytes()), bytearray(_file())
        found[padding] = expected[padding]
        assert found == expected, "the checksums did not notice the damage"
    executor = Executor(_program(), store, _backend())
    executor.run([np.ones(i.shape, dtypes.numpy_dtype(i.dtype)) for i in executor.inputs])
