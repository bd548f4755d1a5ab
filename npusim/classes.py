"""Classes of an image classifier: the most likely ones, and the file with their names beside a program."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from npu_compiler.support.errors import ArtifactError, InputError
from npu_compiler.support.files import write_atomic


def top_classes(scores: np.ndarray, names: list[str] | None, count: int = 5) -> list[dict[str, Any]]:
    """Return the ``count`` most likely classes of logits float[C], most likely first: index, name (or None) and softmax
    probability."""
    x = scores.astype(np.float64)
    p = np.exp(x - x.max())
    p /= p.sum()
    best = np.argsort(-p, kind="stable")[:count]
    return [{"class": int(i), "name": names[i] if names else None, "probability": float(p[i])} for i in best]


def read_labels(given: str | None, program: Path) -> list[str] | None:
    """Return the 1000 class names in the file ``given``, else in the file beside ``program``; None if there is none.

    Raises:
        InputError: the file cannot be read or has another number of lines.
    """
    path = Path(given) if given else program.with_suffix(".labels.txt")
    if not given and not path.exists():
        return None
    try:
        names = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if len(names) != 1000:
        raise InputError(f"{path}: {len(names)} class names, expected 1000")
    return names


def write_labels(program: Path) -> list[Path]:
    """Write the names of ImageNet's classes beside ``program``, where ``npusim run`` reads them.

    Returns:
        The file written; without network, nothing, and a warning is issued.

    Raises:
        ArtifactError: the file cannot be written.
    """
    from .models.download import RegistryUnavailable
    from .models.weights import imagenet_labels

    path = program.with_suffix(".labels.txt")
    try:
        names = imagenet_labels()
    except RegistryUnavailable as error:
        warnings.warn(f"classes will be shown without names: {error}", stacklevel=2)
        return []
    try:
        write_atomic(path, ("\n".join(names) + "\n").encode())
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}") from None
    return [path]
