"""Packed weights on disk and in programs: whatever is done to their bytes, no kernel follows them out of its memory."""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
import torch

from npu_compiler.artifact import serialize
from npu_compiler.artifact.program import BufferSpec, CompiledProgram
from npu_compiler.frontend.export import capture
from npu_compiler.pipeline import compile_entries
from npu_compiler.support.errors import ArtifactError
from npu_compiler.weights.formats.bf16c12.panels import Panels, panel_bytes
from npu_compiler.weights.formats.bf16c12.rows4 import SCALES, FourRows, Rows4
from npu_runtime import CPUBackend
from npu_runtime.arrays import SLAB
from npu_runtime.executor import Executor
from npu_runtime.llm.loader import file_identity
from npu_runtime.packed_weights import read_packed, write_packed
from npu_runtime.weight_loader import WeightStore, load_weights

from ..unit.artifact.test_artifact import repack
from ..unit.weights.test_bf16c12 import Product, weights

K, N = 64, 70


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    example = torch.zeros(1, K, dtype=torch.bfloat16)
    return compile_entries({"main": capture(Product(K, N), (example,))}, weights="bf16c12")


def matrix() -> np.ndarray:
    w = weights(N, K)
    w[np.abs(w.astype(np.float32)) > 100] = 0.5
    return w


@pytest.fixture(scope="module")
def store(program: CompiledProgram) -> WeightStore:
    return load_weights(program, {"weight": matrix()}, CPUBackend(1))


@pytest.fixture
def path(program: CompiledProgram, store: WeightStore, tmp_path: Path) -> Path:
    with open(tmp_path / "packed", "w+b") as file:
        write_packed(file, "key", store, program)
    return tmp_path / "packed"


def read(path: Path, program: CompiledProgram, key: str = "key") -> WeightStore:
    return read_packed(open(path, "rb"), key, CPUBackend(2)).store(program)


def run(program: CompiledProgram, store: WeightStore) -> np.ndarray:
    x = np.ones((1, K), ml_dtypes.bfloat16)
    (result,) = Executor(program, store, CPUBackend(1)).run([x]).values()
    return result


def test_what_is_written_is_read(path: Path, program: CompiledProgram, store: WeightStore) -> None:
    again = read(path, program)
    assert [b.format for b in program.buffers if b.kind == "weight"] == ["bf16c12.panels"]
    assert np.array_equal(again["weight"].to_numpy(), store["weight"].to_numpy())
    assert np.array_equal(run(program, again), run(program, store))


def test_bodies_of_several_slabs(program: CompiledProgram, tmp_path: Path) -> None:
    """Every byte has a checksum, also where slabs meet."""
    size = 2 * SLAB + 12345
    large = copy.copy(program)
    large.buffers = [replace(b, shape=(size,), format="") for b in program.buffers if b.kind == "weight"]
    array = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    path = tmp_path / "large"
    with open(path, "w+b") as file:
        write_packed(file, "key", WeightStore({"weight": CPUBackend(1).wrap(array)}, {}), large)
    assert np.array_equal(read(path, large)["weight"].to_numpy(), array)
    begin = path.stat().st_size - size
    for at in (0, SLAB - 1, SLAB, 2 * SLAB, size - 1):
        damage(path, begin + at)
        with pytest.raises(ArtifactError, match=f"offset {begin + at // SLAB * SLAB}: the checksum does not fit"):
            read(path, large)
        damage(path, begin + at)
    assert np.array_equal(read(path, large)["weight"].to_numpy(), array)


def test_rows_between_slabs_are_checked_too(program: CompiledProgram, tmp_path: Path) -> None:
    """A bad panel is found wherever it lies: first, last, in a slab, across the border of two."""
    row = panel_bytes(K)
    panels = 2 * SLAB // row + 3
    large = copy.copy(program)
    large.buffers = [BufferSpec(90, "weight", "uint8", (1000,), "plain")]
    large.buffers += [replace(b, shape=(1, panels, row)) for b in program.buffers if b.kind == "weight"]
    array = np.zeros((1, panels, row), np.uint8)
    path = tmp_path / "large"
    head = np.zeros(1000, np.uint8)
    offset = 1024  # of the panels in the body
    across = [(n * SLAB - offset) // row for n in (1, 2)]
    assert all((n * SLAB - offset) % row for n in (1, 2))
    for panel in (None, 0, across[0] - 1, across[0], across[0] + 1, across[1], panels - 1):
        array[...] = 0
        if panel is not None:
            array[0, panel, 18] = 1
        store = WeightStore({"plain": CPUBackend(1).wrap(head), "weight": CPUBackend(1).wrap(array)}, {})
        with open(path, "w+b") as file:
            write_packed(file, "key", store, large)
        if panel is None:
            assert np.array_equal(read(path, large)["weight"].to_numpy(), array)
        else:
            with pytest.raises(ArtifactError, match="weight 'weight' is damaged: a panel claims 65536 outliers"):
                read(path, large)


def damage(path: Path, at: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def test_every_flipped_bit_is_noticed(path: Path, program: CompiledProgram) -> None:
    size = path.stat().st_size
    rng = np.random.default_rng(0)
    for at in [*range(64), *rng.integers(64, size, 300).tolist(), size - 1]:
        bit = 1 << int(rng.integers(8))
        if 20 + int.from_bytes(path.read_bytes()[8:16], "little") <= at < begin_of(path):
            continue  # padding
        damage(path, at, bit)
        with pytest.raises(ArtifactError):
            read(path, program)
        damage(path, at, bit)
    read(path, program)


def begin_of(path: Path) -> int:
    length = int.from_bytes(path.read_bytes()[8:16], "little")
    return -(-(20 + length) // 64) * 64


@pytest.mark.parametrize("size", [0, 7, 8, 19, 20, 100, -1, -64])
def test_files_cut_short(path: Path, program: CompiledProgram, size: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:size])
    with pytest.raises(ArtifactError):
        read(path, program)


@pytest.mark.parametrize("length", [2**62, 2**63 - 1, 2**64 - 1])
def test_headers_of_impossible_lengths(path: Path, program: CompiledProgram, length: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + length.to_bytes(8, "little") + data[16:])
    with pytest.raises(ArtifactError, match=f"offset 8: a header of {length} bytes"):
        read(path, program)


def test_weights_of_another_key(path: Path, program: CompiledProgram) -> None:
    with pytest.raises(ArtifactError, match="another program or checkpoint"):
        read(path, program, "other key")


def forge(path: Path, change: Callable[[dict[str, Any], bytearray], None]) -> None:
    """Another header or body, and checksums that fit."""
    data = path.read_bytes()
    length, begin = int.from_bytes(data[8:16], "little"), begin_of(path)
    header, body = msgpack.unpackb(data[20 : 20 + length]), bytearray(data[begin:])
    change(header, body)
    header["sums"] = b"".join(
        zlib.crc32(body[at : at + SLAB]).to_bytes(4, "little") for at in range(0, len(body), SLAB)
    )
    packed = msgpack.packb(header)
    prefix = data[:8] + len(packed).to_bytes(8, "little") + zlib.crc32(packed).to_bytes(4, "little") + packed
    path.write_bytes(prefix.ljust(-(-len(prefix) // 64) * 64, b"\0") + body)


def buffer(field: int, value: Any) -> Callable[[dict[str, Any], bytearray], None]:
    def change(header: dict[str, Any], body: bytearray) -> None:
        header["buffers"][0][field] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (buffer(3, float("inf")), r"header.buffers\[0\]\[3\]: expected a whole number"),
        (buffer(3, 2**63), r"header.buffers\[0\]\[3\]: expected a whole number"),
        (buffer(3, 64), r"header.buffers\[0\]\[3\]: expected a multiple of 64"),
        (buffer(2, [2**60, 2**60]), r"header.buffers\[0\]\[3\]: expected a multiple of 64"),
        (buffer(2, [-1]), r"header.buffers\[0\]\[2\]\[0\]: expected a whole number"),
        (buffer(1, "float99"), r"header.buffers\[0\]\[1\]: expected one of"),
        (buffer(4, "rows"), r"header.buffers\[0\]\[4\]: unknown weight layout 'rows'; weight formats: bf16c12"),
        (buffer(4, ""), "not the weights of program"),
        (buffer(0, "other"), "not the weights of program"),
        (lambda h, b: h["buffers"].append(h["buffers"][0]), "two buffers have one name"),
        (lambda h, b: h.pop("key"), "header: expected the fields"),
    ],
)
def test_forged_headers(
    path: Path, program: CompiledProgram, change: Callable[[dict[str, Any], bytearray], None], message: str
) -> None:
    forge(path, change)
    with pytest.raises(ArtifactError, match=message):
        read(path, program)


PANEL_BYTES = panel_bytes(K)
LIST = 64 + 48 * K


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (16, 2**31 - 1, "claims 2147483647 outliers, it has room for 16"),
        (16, 2**32 - 1, "claims 4294967295 outliers"),
        (PANEL_BYTES + 16, 1 << 16, "claims 65536 outliers"),
        (LIST, 2**32 - 1, f"an outlier is element 4294967295 of a panel of {32 * K}"),
        (2 * PANEL_BYTES + LIST + 8, 32 * K, f"an outlier is element {32 * K} of a panel of {32 * K}"),
    ],
)
@pytest.mark.parametrize("way", ["file", "program"])
def test_outliers_outside_of_their_panel(
    path: Path, program: CompiledProgram, store: WeightStore, at: int, value: int, message: str, way: str
) -> None:
    """Neither a cached file nor a recipe that makes the bytes by itself gets them to a kernel."""
    bad = np.ascontiguousarray(store["weight"].to_numpy())
    flat = bad.reshape(-1)
    flat[at : at + 4] = np.array([value], "<u4").view(np.uint8)
    if way == "file":

        def change(header: dict[str, Any], body: bytearray) -> None:
            body[: flat.size] = flat.tobytes()

        forge(path, change)
        with pytest.raises(ArtifactError, match=f"weight 'weight' is damaged: .*{message}"):
            read(path, program)
    else:
        with pytest.raises(ArtifactError, match=f"weight 'weight' is damaged: .*{message}"):
            load_weights(with_constant(program, bad), {}, CPUBackend(1))


def with_constant(program: CompiledProgram, array: np.ndarray, **changes: Any) -> CompiledProgram:
    """The program with a constant in place of its packed weight, and the same native code, written and read."""
    plain = copy.deepcopy(serialize.program_to_plain(program))
    node = {
        "op": "const", "inputs": [], "outputs": [[list(array.shape), "uint8"]], "sources": [],
        "attrs": {"data": {"dtype": "uint8", "shape": list(array.shape), "data": array.tobytes()}},
    }  # fmt: skip
    plain["recipes"]["nodes"], plain["recipes"]["outputs"] = [node], [["weight", 0, 0]]
    plain["weights"] = []
    for b in plain["buffers"]:
        if b["kind"] == "weight":
            b.update(changes)
    return CompiledProgram.loads(repack(plain))


def test_constants_in_place_of_packing(program: CompiledProgram, store: WeightStore) -> None:
    """What passes the check runs; the native code knows the format of its weight, whatever the file says."""
    good = np.ascontiguousarray(store["weight"].to_numpy())
    same = with_constant(program, good)
    assert np.array_equal(run(same, load_weights(same, {}, CPUBackend(1))), run(program, store))
    other = with_constant(program, good, format="")
    with pytest.raises(ArtifactError, match="built for other buffers"):
        run(other, load_weights(other, {}, CPUBackend(1)))
    with pytest.raises(ArtifactError, match=r"buffers\[\d\].format: unknown weight layout 'rows'; .*: bf16c12"):
        with_constant(program, good, format="rows")


# -- the checks ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("k", [8, 16, 24, 32, 40, 64, 104, 1536, 8960, 18944])
def test_panels_of_all_widths_pass(k: int) -> None:
    Panels().check(Panels().pack(weights(40, k)))
    with pytest.raises(ValueError, match="no matrix has panels of"):
        Panels().check(np.zeros((1, panel_bytes(k) + 1), np.uint8))


@pytest.mark.parametrize("k", [64, 128, 1536, 8960])
def test_rows4_of_all_widths_pass(k: int) -> None:
    w = weights(9, k)
    w[np.abs(w.astype(np.float32)) > 100] = 0.5
    w[np.abs(w.astype(np.float32)) < 1e-20] = 0.5
    packed = Rows4().pack(w)
    Rows4().check(packed)
    FourRows(k).split(packed)[1][1, SCALES:].view("<u4")[0] = k << 16
    with pytest.raises(ValueError, match=f"an outlier is in column {k} of {k}"):
        Rows4().check(packed)
    with pytest.raises(ValueError, match="no matrix has four rows of"):
        Rows4().check(packed[:, 128:])


# -- staleness -------------------------------------------------------------------------------------------------------
def test_another_file_of_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    """What ``cp -p``, ``rsync -t`` and ``tar -x`` leave behind."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"a" * 100)
    os.utime(path, ns=(10**18, 10**18))
    for folder in (path, tmp_path):
        before = file_identity(folder)
        assert file_identity(folder) == before
        (tmp_path / "new").write_bytes(b"b" * 100)
        os.utime(tmp_path / "new", ns=(10**18, 10**18))
        os.replace(tmp_path / "new", path)
        assert path.stat().st_mtime_ns == 10**18 and file_identity(folder) != before
        before = file_identity(folder)
        path.write_bytes(b"c" * 100)  # in place: the same inode
        os.utime(path, ns=(10**18, 10**18))
        assert path.stat().st_mtime_ns == 10**18 and file_identity(folder) != before
