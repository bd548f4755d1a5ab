"""Copies of exported programs, which passes of the frontend change."""

from __future__ import annotations

import copy
import warnings

from torch.export import ExportedProgram


def writable(program: ExportedProgram, in_place: bool) -> ExportedProgram:
    """Return ``program`` itself if it may be changed ``in_place``, else a copy."""
    if in_place:
        return program
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)  # PyTorch's own use
        return copy.deepcopy(program)
