"""Reads ``.pt2`` files, which ``torch.export.save`` writes."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..support.errors import InputError

__all__ = ["load_exported"]


def load_exported(path: str | os.PathLike[str]) -> torch.export.ExportedProgram:
    """Load the program in a ``.pt2`` file, for ``capture``. PyTorch unpickles parts of it: load only trusted files.

    Raises:
        InputError: the file cannot be read, or is of a version of PyTorch whose format differs.
    """
    try:
        if (found := _other_file(path)) is not None:
            advice = "torch.export.save(torch.export.export(model, inputs), 'model.pt2') writes one"
            raise InputError(f"{path}: it is {found}, not a program of torch.export.save; {advice}")
        with _quiet(), open(path, "rb") as file:  # torch cannot open a path that is not UTF-8
            return torch.export.load(file)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except InputError:
        raise
    except Exception as error:  # torch.export.load documents no exception types
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "warnings above" in line:  # which were suppressed
            line = "the file is damaged or incomplete"
        raise InputError(f"{path}: torch {torch.__version__} cannot load it: {line}") from None


def _other_file(path: str | os.PathLike[str]) -> str | None:
    """Return what a file is that torch.export.save did not write, else None."""
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            start = file.read(2)
        return "a pickle (weights without the model)" if start == b"\x80\x02" else "damaged or of another kind"
    with zipfile.ZipFile(path) as archive:
        names = {name.partition("/")[2] for name in archive.namelist()}
    if any(name.startswith("code/") for name in names):
        return "a TorchScript program"
    return "a file of torch.save (weights without the model)" if "data.pkl" in names else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the traceback that torch logs before it raises."""
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
