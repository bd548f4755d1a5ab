"""The container of a ``.npubin`` file: a fixed header, then a msgpack map.

====== ====== ==========================================================
offset bytes  header (little endian)
====== ====== ==========================================================
0      8      magic; a transfer in text mode would change its line ends
8      4      format version
12     4      contents: 0 a program, 1 a mixed model
16     8      bytes of the body, which ends the file
24     32     SHA-256 of the body
====== ====== ==========================================================

The fields of a program are in :mod:`npu_compiler.artifact.serialize`, those of a mixed model in
:mod:`npu_compiler.mixed.serialize`.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from ..support.errors import ArtifactError
from ..support.files import write_atomic

MAGIC = b"\x89NPU\r\n\x1a\n"
FORMAT_VERSION = 4
PROGRAM, MIXED = 0, 1
HEADER = struct.Struct("<8sIIQ32s")

_CONTENTS = {PROGRAM: "a program", MIXED: "a mixed model"}
_READERS = {PROGRAM: "CompiledProgram.load", MIXED: "MixedProgram.load"}

T = TypeVar("T")


def pack(contents: int, plain: Any) -> bytes:
    """Return the bytes of a file. Raises ``ArtifactError`` for a value that msgpack does not have."""
    try:
        body: bytes = msgpack.packb(plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArtifactError(f"the program cannot be written: {error}") from None
    return HEADER.pack(MAGIC, FORMAT_VERSION, contents, len(body), hashlib.sha256(body).digest()) + body


def unpack(data: bytes, contents: int | None = None) -> tuple[int, Any]:
    """Return (contents, body) of the bytes of a file, whose header and checksum are right.

    Raises ``ArtifactError`` with the offset that is wrong, also if the file has other contents than ``contents``.
    """
    if len(data) < HEADER.size:
        raise ArtifactError(f"offset {len(data)}: the file ends within its {HEADER.size}-byte header")
    magic, version, found, length, digest = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ArtifactError("offset 0: this is not a .npubin file (its first 8 bytes differ)")
    if version != FORMAT_VERSION:
        advice = "compile the model again"
        raise ArtifactError(f"offset 8: format version {version}, this build reads {FORMAT_VERSION}; {advice}")
    if length != len(data) - HEADER.size:
        raise ArtifactError(
            f"offset 16: {length} bytes should follow the header, but {len(data) - HEADER.size} do; damaged file"
        )
    body = memoryview(data)[HEADER.size :]
    if hashlib.sha256(body).digest() != digest:
        raise ArtifactError("offset 24: the checksum does not fit the contents; damaged file")
    if found not in _CONTENTS:
        raise ArtifactError(f"offset 12: contents of kind {found}, this build reads 0 and 1; compile the model again")
    if contents is not None and found != contents:
        advice = f"use npu_runtime.load or {_READERS[found]}"
        raise ArtifactError(f"offset 12: the file holds {_CONTENTS[found]}, not {_CONTENTS[contents]}; {advice}")
    try:
        return found, msgpack.unpackb(body, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        detail = error or type(error).__name__
        raise ArtifactError(f"offset {HEADER.size}: the body is not msgpack: {detail}") from None


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, atomically: a failure leaves the old one. Raises ``ArtifactError``."""
    try:
        write_atomic(path, data)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}") from None


def read(path: str | os.PathLike[str], parse: Callable[[bytes], T]) -> T:
    """Return ``parse`` of a file's bytes. Raises ``ArtifactError`` with the file's name and what is wrong."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        return parse(data)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from None
