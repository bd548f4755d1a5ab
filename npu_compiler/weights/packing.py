"""The orders in which weights are kept for a target's micro-kernel: what ``pack`` nodes make, at load time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .formats import bf16c12, bf16c12_rows4

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """``spec`` gives shape and dtype of a packed weight [G, K, T, C] (groups, output channels, taps, input channels) of
    a dtype in panels of so many output channels, or None if that weight cannot be kept so; ``pack`` makes it.
    ``check``, for layouts whose bytes say where kernels read and write: raises ``ValueError`` if such a place lies
    outside the weight. What ``pack`` made passes; bytes from elsewhere must be checked before a kernel reads them."""

    spec: Callable[[Shape, str, int], tuple[Shape, str] | None]
    pack: Callable[[np.ndarray, int], np.ndarray]
    check: Callable[[np.ndarray], None] | None = None


def _rows_spec(shape: Shape, dtype: str, panel: int) -> tuple[Shape, str]:
    g, k, t, c = shape
    return (g, -(-k // panel), t, c, panel), dtype


def _pairs_spec(shape: Shape, dtype: str, panel: int) -> tuple[Shape, str]:
    g, k, t, c = shape
    return (g, -(-k // panel), t, -(-c // 2), panel, 2), dtype


def _coded_spec(shape: Shape, dtype: str, panel: int) -> tuple[Shape, str] | None:
    g, k, t, c = shape
    if (g, t, dtype, panel) != (1, 1, "bfloat16", bf16c12.PANEL) or c == 0 or c % bf16c12.K_MULTIPLE:
        return None
    return (1, -(-k // panel), bf16c12.panel_bytes(c)), "uint8"


def _quads_spec(shape: Shape, dtype: str, panel: int) -> tuple[Shape, str] | None:
    g, k, t, c = shape
    if (g, t, dtype, panel) != (1, 1, "bfloat16", bf16c12_rows4.ROWS) or not bf16c12_rows4.has_quads(c):
        return None
    return bf16c12_rows4.quad_shape(k, c), "uint8"


def _padded(w: np.ndarray, panel: int, even: bool) -> np.ndarray:
    """[G, K / panel, panel, T, C]: whole panels, and an even C if asked for."""
    g, k, t, c = w.shape
    kp = -(-k // panel) * panel
    out = np.zeros((g, kp, t, c + c % 2 if even else c), w.dtype)
    out[:, :k, :, :c] = w
    return out.reshape(g, kp // panel, panel, t, out.shape[-1])


def _pack_rows(w: np.ndarray, panel: int) -> np.ndarray:
    return np.ascontiguousarray(_padded(w, panel, even=False).transpose(0, 1, 3, 4, 2))


def _pack_pairs(w: np.ndarray, panel: int) -> np.ndarray:
    out = _padded(w, panel, even=True)
    out = out.reshape(*out.shape[:-1], out.shape[-1] // 2, 2)
    return np.ascontiguousarray(out.transpose(0, 1, 3, 4, 2, 5))


LAYOUTS = {
    "rows": Layout(_rows_spec, _pack_rows),
    "pairs": Layout(_pairs_spec, _pack_pairs),  # for two-element dot products
    "coded": Layout(_coded_spec, lambda w, panel: bf16c12.pack_coded(w[0, :, 0])[None], bf16c12.check_coded),
    "quads": Layout(_quads_spec, lambda w, panel: bf16c12_rows4.pack_quads(w[0, :, 0]), bf16c12_rows4.check_quads),
}


CHECKED = tuple(name for name, layout in LAYOUTS.items() if layout.check is not None)


def packed_spec(layout: str, shape: Shape, dtype: str, panel: int) -> tuple[Shape, str]:
    """Shape and dtype of a packed weight; raises ``ValueError`` if there is no such thing."""
    found = LAYOUTS[layout].spec(shape, dtype, panel) if layout in LAYOUTS else None
    if found is None:
        raise ValueError(f"{dtype}{list(shape)} cannot be packed as {layout!r} in panels of {panel}")
    return found


def pack(w: np.ndarray, panel: int, layout: str) -> np.ndarray:
    """A weight [G, K, T, C] in panels of ``panel`` output channels, zero padded; 'coded' and 'quads'
    may raise ``IncompressibleError``."""
    return LAYOUTS[layout].pack(w, panel)
