"""GGUF files of every family: their bytes, and their metadata and tensor lists changed and written again."""

from __future__ import annotations

import copy
import random
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from npu_compiler.frontend.llm import open_checkpoint
from npu_compiler.frontend.llm.gguf_file import GGUFFile

from .. import model_files
from ..mutations import mutate_bytes, mutate_tree, odd_value

_TYPES = (2, 8, 12, 14, 20, 39, 99)  # of tensors
_VALUES = ("llama", "gpt2", "yarn", "longrope", 0, 2**32 - 1, [1.0, 2.0], ["a", "b"], [True], "", [8, 8], *_TYPES)
_ALIGNMENT = 32


@cache
def _files() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        return [
            model_files.gguf_bytes(family, Path(folder), quantised)
            for family in model_files.FAMILIES
            for quantised in (False, True)
        ]


@cache
def trees() -> list[Any]:
    """[metadata, tensors]; a tensor is [name, shape, type, bytes as text that JSON could hold]."""
    trees = []
    with tempfile.TemporaryDirectory() as folder:
        for data in _files():
            path = Path(folder) / "a.gguf"
            path.write_bytes(data)
            file = GGUFFile(path)
            entries = sorted(file._entries.items(), key=lambda item: item[1].begin)
            ends = [e.begin for _, e in entries[1:]] + [len(data)]
            tensors = [
                [name, list(e.shape), e.kind, data[e.begin : end]] for (name, e), end in zip(entries, ends, strict=True)
            ]
            trees.append([dict(file.metadata), tensors])
    return trees


def case(rng: random.Random, folder: Path) -> None:
    if rng.random() < 0.4:
        data = mutate_bytes(rng, rng.choice(_files()), rng.choice(_files()))
        if rng.random() < 0.5:  # where the structure is
            data = _splice_header(rng, data)
    else:
        tree = copy.deepcopy(rng.choice(trees()))
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            fields = tree[0] if isinstance(tree[0], dict) else {}
            if fields and rng.random() < 0.5:  # most places in the tree are elements of token lists
                fields[rng.choice(list(fields))] = rng.choice((odd_value(rng), rng.choice(_VALUES)))
            else:
                mutate_tree(rng, tree, _VALUES)
        try:
            data = encode(tree)
        except (TypeError, ValueError, AttributeError, KeyError, struct.error):  # no file can say this
            return
    path = folder / "a.gguf"
    path.write_bytes(data)
    model_files.use_checkpoint(open_checkpoint(path))


def _splice_header(rng: random.Random, data: bytes) -> bytes:
    head = rng.randrange(8, 3000)
    return mutate_bytes(rng, data[:head], rng.choice(_files())[:3000]) + data[head:]


def encode(tree: Any) -> bytes:
    """The file of a tree, whatever types its values have."""
    metadata, tensors = tree
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _text(key) + _value(value)
    body = b""
    for name, shape, kind, data in tensors:
        out += _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        out += struct.pack("<IQ", kind, len(body))
        body += data + bytes(-len(data) % _ALIGNMENT)
    return out + bytes(-len(out) % _ALIGNMENT) + body


def _text(text: str) -> bytes:
    data = text.encode("utf-8", errors="surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    kind, data = _typed(value)
    return struct.pack("<I", kind) + data


def _typed(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int() if 0 <= value < 2**32:
            return 4, struct.pack("<I", value)
        case int() if value < 0:
            return 11, struct.pack("<q", value)
        case int():
            return 10, struct.pack("<Q", value)
        case float():
            return 12, struct.pack("<d", value)
        case str():
            return 8, _text(value)
        case list() | bytes():
            typed = [_typed(v) for v in value]
            kinds = {kind for kind, _ in typed} or {4}
            if len(kinds) > 1:
                raise ValueError("arrays have one type")
            return 9, struct.pack("<IQ", kinds.pop(), len(typed)) + b"".join(data for _, data in typed)
        case _:
            raise TypeError(f"no metadata type holds {value!r}")
