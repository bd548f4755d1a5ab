"""Damaged images of every format that commands read, and the crop that models want of them."""

from __future__ import annotations

import io
import random
import struct
import zlib
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, features

from npusim.models.images import read_image, resize_and_crop

from ..mutations import INTEGERS, mutate_bytes


def case(rng: random.Random, folder: Path) -> None:
    kind, data = rng.choice(_images())
    match rng.randrange(8):
        case 0 if kind == "PNG":
            data = _png_of_another_size(rng, data)
        case 1:
            data = mutate_bytes(rng, data[: rng.randint(8, 64)]) + data[64:]  # the header
        case _:
            data = mutate_bytes(rng, data, rng.choice(_images())[1])
    path = folder / f"a.{kind.lower()}"
    path.write_bytes(data)
    image = read_image(path)
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
    assert resize_and_crop(image, 32, 28).shape == (28, 28, 3)


@cache
def _images() -> list[tuple[str, bytes]]:
    rng = np.random.default_rng(0)
    smooth = np.add.outer(np.arange(33), np.arange(41)).astype(np.uint8) * 3
    noise = rng.integers(0, 256, (29, 37, 4), np.uint8)
    pictures = [
        Image.fromarray(smooth),
        Image.fromarray(noise[..., :3].copy()),
        Image.fromarray(noise),
        Image.fromarray(smooth).quantize(16),
        Image.fromarray(smooth > 99),
        Image.fromarray(smooth.astype(np.uint16) * 99),
    ]
    made: list[tuple[str, bytes]] = []
    for kind in ("PNG", "JPEG", "BMP", "GIF", *(["WEBP"] if features.check("webp") else [])):
        for picture in pictures:
            for options in ({}, {"progressive": True} if kind == "JPEG" else {"interlace": True}):
                buffer = io.BytesIO()
                try:
                    picture.save(buffer, kind, **options)
                except (OSError, ValueError):  # this format does not hold such pictures
                    continue
                made.append((kind, buffer.getvalue()))
    return made


def _png_of_another_size(rng: random.Random, data: bytes) -> bytes:
    """The same pixels behind a header, with a right checksum, that says something else."""
    sizes = [n % 2**31 for n in INTEGERS] + [30000, 5000]
    header = struct.pack(">II", rng.choice((1, 41, rng.choice(sizes))), rng.choice((1, 33, rng.choice(sizes))))
    header = b"IHDR" + header + bytes([rng.choice((1, 8, 16)), rng.choice((0, 2, 3, 4, 6)), 0, 0, rng.randrange(2)])
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]
