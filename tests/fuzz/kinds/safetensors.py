"""safetensors files and directories of shards: headers changed and written again, indices, bytes."""

from __future__ import annotations

import copy
import json
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from npu_compiler.weights.files import BLOCKS, open_weights

from ..mutations import mutate_bytes, mutate_tree

_VALUES = ("F32", "BF16", "F16", "F64", "I64", "BOOL", "C64", "F8_E4M3", "F4", [0, 0], [1], [2**48], [0, 2**47, 2**47])


@cache
def _file(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    dtypes = (np.float32, np.float16, np.int64, np.bool_, np.uint8, ml_dtypes.bfloat16)
    arrays = {f"{seed}.{i}.weight": rng.integers(0, 2, (i, 3)).astype(d) for i, d in enumerate(dtypes)}
    arrays[f"{seed}.blocks"] = rng.integers(0, 256, (3, 36), np.uint8)
    metadata = {"format": "pt", BLOCKS: json.dumps({f"{seed}.blocks": ["q4_0", 64, "float32"]})}
    return safetensors.numpy.save({**arrays, f"{seed}.scalar": np.array(1.5, np.float32)}, metadata)


def _parts(data: bytes) -> tuple[Any, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _forged(rng: random.Random, data: bytes) -> bytes:
    header, body = copy.deepcopy(_parts(data))
    for _ in range(rng.choice((1, 1, 2, 4))):
        mutate_tree(rng, header, _VALUES)
    if rng.random() < 0.2 and isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
        table = {"0.blocks": ["q4_0", 64, "float32"]}
        mutate_tree(rng, table, ("q4_k", "q8_0", "bfloat16", 256, -32, 2**70))
        header["__metadata__"][BLOCKS] = json.dumps(table)
    text = json.dumps(header).encode()
    length = rng.choice([len(text)] * 6 + [0, len(text) - 1, len(text) + 1, 10**8, 2**63, 2**64 - 1])
    return length.to_bytes(8, "little") + text + body


def case(rng: random.Random, folder: Path) -> None:
    damage = rng.choice((_forged, lambda r, data: mutate_bytes(r, data, _file(1))))
    if rng.random() < 0.5:
        path = folder / "a.safetensors"
        path.write_bytes(damage(rng, _file(0)))
    else:
        path = folder
        index = {"metadata": {"total_size": 1}, "weight_map": {}}
        for seed in (0, 1):
            name = f"model-{seed}.safetensors"
            (folder / name).write_bytes(damage(rng, _file(seed)) if rng.random() < 0.3 else _file(seed))
            index["weight_map"] |= dict.fromkeys(_parts(_file(seed))[0], name)  # type: ignore[operator]
        text = json.dumps(index).encode()
        if rng.random() < 0.5:
            mutate_tree(rng, index, ("../a.safetensors", "model-0.safetensors", "", ".", "x" * 300))
            text = json.dumps(index).encode()
        if rng.random() < 0.2:
            text = mutate_bytes(rng, text)
        (folder / "model.safetensors.index.json").write_bytes(text)
    source = open_weights(path)
    for name in source.names():
        shape, _ = source.spec(name)
        array = source.read(name)
        assert array.shape == shape and array.size == math.prod(shape)
