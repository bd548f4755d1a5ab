"""Arrays and images that commands read and write: what fuzzing and an attacker's files found."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from npu_compiler.artifact.program import IOSpec
from npu_compiler.support import npy
from npu_compiler.support.errors import InputError, WeightError
from npu_compiler.weights.files import open_weights
from npusim.arrays import read_inputs, save_npz
from npusim.models.images import read_image, resize_and_crop

SPECS = (IOSpec("x", (3, 4), "float32", 0), IOSpec("n", (2,), "int64", 1))


def npy_bytes(header: str) -> bytes:
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + bytes(48)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}", "announces"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999999,)}", "announces the shape"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-3,)}", "announces the shape"),
        ("{'descr': '|S2000000000', 'fortran_order': False, 'shape': (1,)}", "announces 2000000000 bytes"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "Python objects"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4", "damaged"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': '''", "damaged"),
        ("(" * 5000, "damaged"),
        ("{'a': " + "-" * 4000 + "1}", "damaged"),
        ("1" * 5000, "damaged"),
    ],
    ids=range(10),
)
def test_headers_of_npy_files(header: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npy_bytes(header))
    with pytest.raises(InputError, match=rf"a\.npy: cannot be read as an \.npy array: .*{message}"):
        read_inputs([str(tmp_path / "a.npy")], SPECS, "p")


def test_npy_files_are_read_as_numpy_reads_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    many = [np.float32(3), np.zeros((0, 3)), rng.random((700, 301)), np.asfortranarray(rng.random((3, 4, 5))),
            np.arange(5, dtype=">i4"), np.array([True, False]), np.array(["a", "bc"]), np.array(3 + 4j)]  # fmt: skip
    for array in many:
        np.save(tmp_path / "a.npy", array)
        (got,) = read_inputs([str(tmp_path / "a.npy")], SPECS, "p").values()
        np.testing.assert_array_equal(got, array)
        assert got.shape == array.shape and got.dtype == array.dtype


def test_an_archive_is_looked_at_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few megabytes of zeros, compressed, may be gigabytes."""
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros((3000, 4000), np.float32))
    monkeypatch.setattr(npy, "read_data", lambda *_: pytest.fail("the data were read"))
    with pytest.raises(InputError, match=r"'x' has shape \[3000, 4000\], expected \[3, 4\]"):
        read_inputs([str(path)], SPECS, "p")
    assert open_weights(path).spec("x") == ((3000, 4000), "float32")


def test_members_that_are_not_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"text")
    with pytest.raises(WeightError, match=r"a\.npz: weight 'x' is damaged"):
        read_inputs([str(path)], SPECS, "p")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", b"text")
    with pytest.raises(InputError, match=r"it holds 'notes\.txt'; the inputs are x, n"):
        read_inputs([str(path)], SPECS, "p")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", b"")
        archive.writestr("x.npy", b"")
    with pytest.raises(WeightError, match="an array is listed twice"):
        open_weights(path)


def test_an_archive_of_every_dtype(tmp_path: Path) -> None:
    arrays = {"b": np.arange(3).astype(ml_dtypes.bfloat16), "big": np.arange(3, dtype=">f8"), "bool": np.array([True])}
    np.savez(tmp_path / "a.npz", **arrays)
    source = open_weights(tmp_path / "a.npz")
    assert [source.spec(n)[1] for n in arrays] == ["bfloat16", "float64", "bool"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(source.read(name).astype(np.float64), array.astype(np.float64))


def test_files_whose_name_has_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("a=b.npy", np.float32(1))
    np.save("b.npy", np.float32(2))
    np.save("n=b.npy", np.float32(3))
    assert read_inputs(["a=b.npy"], SPECS, "p") == {"x": 1}
    assert read_inputs(["n=b.npy"], SPECS, "p") == {"n": 2}
    assert read_inputs(["./n=b.npy"], SPECS, "p") == {"x": 3}
    assert read_inputs(["c=b.npy"], SPECS, "p") == {"c": 2}  # the executor says which inputs there are


def test_outputs_of_any_name(tmp_path: Path) -> None:
    arrays = {"file": np.arange(3), "allow_pickle": np.float32(1), "a/b": np.zeros((2, 0)), "é": np.array([True]),
              "half": np.arange(2).astype(ml_dtypes.bfloat16)}  # fmt: skip
    save_npz(str(tmp_path / "out"), arrays)
    with np.load(tmp_path / "out") as loaded:
        assert set(loaded.files) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(loaded[name], array.astype(np.float32) if name == "half" else array)
    with pytest.raises(InputError, match="name cannot be written"):
        save_npz(str(tmp_path / "out"), {"x" * 70000: np.arange(3)})
    with pytest.raises(InputError, match="cannot be written"):
        save_npz(str(tmp_path / "none" / "out"), arrays)


def png(width: int, height: int) -> bytes:
    """Black pixels, one bit each."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    rows = zlib.compress(bytes((1 + -(-width // 8)) * height), 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(30000, 1), (1, 30000), (3000, 90), (8193, 8192), (12000, 12000)])
def test_images_that_would_be_too_large(width: int, height: int, tmp_path: Path) -> None:
    data = bytearray(png(min(width, 30000), min(height, 30000)))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(InputError, match=rf"a\.png: an image of {width} x {height} pixels"):
        read_image(tmp_path / "a.png")


def test_images_that_are_not_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"text")
    for name, message in (("a.png", "cannot be read as an image"), ("none.png", "No such file"), (".", "cannot be")):
        with pytest.raises(InputError, match=message):
            read_image(tmp_path / name)
    (tmp_path / "b.png").write_bytes(png(40, 30))
    assert read_image(tmp_path / "b.png").shape == (30, 40, 3)
    for shape in ((0, 9, 3), (1, 40, 3)):
        with pytest.raises(InputError, match="an image of"):
            resize_and_crop(np.zeros(shape, np.uint8))


def test_formats_other_than_images_are_not_opened(tmp_path: Path) -> None:
    """Pillow opens dozens of formats, some by other programs."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (40, 30)).save(buffer, "TIFF")
    (tmp_path / "a.png").write_bytes(buffer.getvalue())
    with pytest.raises(InputError, match="cannot be read as an image"):
        read_image(tmp_path / "a.png")
