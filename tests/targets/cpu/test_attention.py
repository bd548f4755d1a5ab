"""The CPU attention kernels against float64 numpy: grouped heads, masks, causal, padded key caches, tiles of AMX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from npu_compiler.targets.cpu.host import host_cpu

from ...support.amx_model import HAS_AMX
from ...support.kernel_driver import AMX, ARCHS, CXX, NUMPY, build, entry, random, struct
from ...support.sweeps import FULL

pytestmark = pytest.mark.skipif(CXX is None, reason="no g++ on this machine")


# ------------------------------------------------------------------------------------------------ attention
@dataclass(frozen=True)
class Attention:
    B: int = 1
    H: int = 2
    HK: int = 2
    SQ: int = 37
    SK: int = 37
    DH: int = 16
    DV: int = 16
    causal: bool = False
    mask: str = ""
    keys: int = 0
    first: int = 0


ATTENTIONS = [
    Attention(),
    Attention(B=2, H=4, HK=2, SQ=20, SK=150, DH=33, DV=65),
    Attention(H=6, HK=2, SQ=1, SK=300, DH=64, DV=64, keys=211),
    Attention(H=4, HK=1, SQ=3, SK=130, DH=40, DV=24, causal=True, keys=120, first=100),
    Attention(SQ=130, SK=130, causal=True, DH=64, DV=64),
    Attention(SQ=70, SK=40, causal=True),
    Attention(B=2, SQ=40, SK=120, mask="float"),
    Attention(SQ=40, SK=61, mask="bool8"),
    Attention(B=2, H=3, HK=3, SQ=5, SK=90, mask="f16", causal=True),
    Attention(B=2, H=8, HK=1, SQ=1, SK=37, DH=40, DV=21, mask="bool8"),
    Attention(H=8, HK=2, SQ=2, SK=50, DH=7, DV=129, causal=True, keys=45, first=43),
    Attention(H=6, HK=2, SQ=45, SK=300, DH=128, DV=128, keys=290, mask="Positions"),
    Attention(B=2, H=6, HK=2, SQ=2, SK=70, DH=64, DV=96, keys=55, mask="Positions"),
    # Heads that two threads do not share evenly: ranges of keys.
    Attention(H=9, HK=3, SQ=1, SK=2100, DH=128, DV=64, keys=2090, mask="Positions"),
    Attention(H=2, HK=1, SQ=4, SK=1500, DH=140, DV=41, mask="bool8", causal=True, first=1300),
    Attention(H=3, HK=1, SQ=70, SK=256, DH=64, DV=64, causal=True, keys=240, first=170),
    Attention(HK=1, SQ=40, SK=600, DH=160, causal=True, keys=590, first=550),
    Attention(H=8, HK=1, SQ=1, SK=200, DH=160, DV=64, keys=149),  # two passes over the keys
]


def attention_reference(
    c: Attention, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None
) -> np.ndarray:
    keys = c.keys or c.SK
    q, k, v = (t.astype(np.float64) for t in (q, k[:, :, :keys], v[:, :, :keys]))
    k, v = (np.repeat(t, c.H // c.HK, axis=1) for t in (k, v))
    s = 0.3 * np.einsum("bhid,bhjd->bhij", q, k)
    if mask is not None and mask.dtype == np.int64:
        s = np.where(np.arange(keys) <= mask[:, None], s, -np.inf)
    elif mask is not None:
        s = s + (np.where(mask, 0, -np.inf) if mask.dtype == np.bool_ else mask.astype(np.float64))
    if c.causal:
        s = np.where(np.arange(keys) <= np.arange(c.SQ)[:, None] + c.first, s, -np.inf)
    top = s.max(axis=-1, keepdims=True)
    e = np.exp(s - np.where(np.isinf(top), 0, top))
    total = e.sum(axis=-1, keepdims=True)
    return np.einsum("bhij,bhjd->bhid", np.divide(e, total, out=np.zeros_like(e), where=total > 0), v)


def rounds_weights(c: Attention, arch: str, dtype: str) -> bool:
    """Whether a kernel multiplies values by weights in bfloat16: tiles of AMX, and `vdpbf16ps`."""
    if dtype != "bf16" or arch not in (AMX, "native"):
        return False
    if arch == AMX or HAS_AMX:
        return True
    decodes = c.H // c.HK * c.SQ <= 8
    return "avx512bf16" in host_cpu().features and (c.DH % 32 == c.DV % 32 == 0 if decodes else c.DH % 2 == 0)


def positions(c: Attention) -> np.ndarray:
    """The queries' positions in the cache: in no order, the last one sees all keys."""
    return np.append(np.random.default_rng(c.SQ).integers(0, c.keys, c.SQ - 1), c.keys - 1)


@dataclass(frozen=True)
class Cache:
    """Keys or values: the numbers, and what the kernel gets."""

    numbers: np.ndarray
    held: np.ndarray


def scaled_rows(rng: np.random.Generator, kind: str, shape: tuple[int, ...], swap: bool, rounds: bool) -> Cache:
    """A cache of 8-bit numbers, followed by the scales of its rows. ``rounds``: the kernel rounds numbers to bf16."""
    codes, scales = rng.integers(-127, 128, shape, np.int8), rng.random((*shape[:3], 1), np.float32) / 64
    if kind == "e4m3":
        codes = codes.astype(NUMPY[kind])
    numbers = codes.astype(np.float32) * scales
    held = codes.transpose(0, 2, 1, 3) if swap else codes
    parts = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (held, scales)]
    padding = np.zeros(-codes.size % 4, np.uint8)
    wide = numbers.astype(NUMPY["bf16"]).astype(np.float32) if rounds else numbers
    return Cache(wide, np.concatenate([parts[0], padding, parts[1]]))


# As in test_kernels.py: float32 has no conversions, and float16 is float32 but for its own.
TYPES = ("float", "f16", "bf16")
CASES = [(a, t, "") for a in ARCHS for t in (TYPES if FULL or a == "native" else TYPES[1:])] + [(AMX, "bf16", "")]


@pytest.mark.parametrize(("arch", "dtype", "scaled"), [*CASES, ("native", "bf16", "int8_t"), (AMX, "bf16", "e4m3")])
def test_attention(tmp_path: Path, arch: str, dtype: str, scaled: str) -> None:
    """``scaled``: the type of caches of 8-bit numbers."""
    whole = arch in ("native", AMX) and not scaled and (FULL or dtype != "f16")
    cases = ATTENTIONS if whole else ATTENTIONS[1:12:2]
    bodies, scratch = [], []
    for i, c in enumerate(cases):
        strides: dict[str, int] = {}
        for name, heads, rows, width in (
            ("q", c.H, c.SQ, c.DH),
            ("k", c.HK, c.SK, c.DH),
            ("v", c.HK, c.SK, c.DV),
            ("o", c.H, c.SQ, c.DV),
        ):
            if i % 2:  # [B, S, H, D] in memory
                strides |= {f"{name}_b": heads * rows * width, f"{name}_h": width, f"{name}_s": heads * width}
            else:
                strides |= {f"{name}_b": heads * rows * width, f"{name}_h": rows * width, f"{name}_s": width}
        if c.mask and c.mask != "Positions":  # shared by the heads
            strides |= {"m_b": c.SQ * c.SK, "m_q": c.SK, "m_k": 1}
        names = "B H HK SQ SK DH DV causal".split()
        bodies.append(struct(f"D{i}", "AttentionDims", **{n: getattr(c, n) for n in names}, scale=0.3, **strides))
        mask = f"(const {c.mask}*)a.extra" if c.mask else "(const NoMask*)nullptr"
        rows = [f"(const {dtype}*)a.{name}" for name in ("w", "bias")]
        if scaled:
            sizes = [-(-c.B * c.HK * c.SK * width // 4) * 4 for width in (c.DH, c.DV)]
            rows = [
                f"CacheRows<{scaled}>{{(const {scaled}*)a.{name}, (const float*)((const char*)a.{name} + {size})}}"
                for name, size in zip(("w", "bias"), sizes, strict=True)
            ]
        bodies.append(
            entry(
                f"attention{i}",
                f"attention<D{i}>((const {dtype}*)a.x, {', '.join(rows)}, {mask},"
                f" ({dtype}*)a.out, th, a.counters, a.keys, a.first);",
            )
        )
        scratch.append(f"attention_scratch_bytes<D{i}, {dtype}{f', {scaled}' if scaled else ''}>()")
    library = build(tmp_path, arch, bodies, scratch)
    rng = np.random.default_rng(5)
    for threads in (1, 2):
        library.start(threads)
        for i, c in enumerate(cases):

            def stored(t: np.ndarray, swap: bool = bool(i % 2)) -> np.ndarray:
                return np.ascontiguousarray(t.transpose(0, 2, 1, 3)) if swap else t

            tiles = dtype == "bf16" and (arch == AMX or (arch == "native" and HAS_AMX))
            q = random(rng, (c.B, c.H, c.SQ, c.DH), dtype)
            shapes = [(c.B, c.HK, c.SK, width) for width in (c.DH, c.DV)]
            if scaled:
                rounds = tiles and c.H // c.HK * c.SQ > 8
                key, value = (scaled_rows(rng, scaled, s, bool(i % 2), rounds) for s in shapes)
            else:
                caches = [random(rng, s, dtype) for s in shapes]
                for x in caches:
                    x[:, :, c.keys or c.SK :] = np.nan  # not read
                key, value = (Cache(x, stored(x)) for x in caches)
            k, v = key.numbers, value.numbers
            mask = None
            if c.mask == "Positions":
                mask = positions(c)
            elif c.mask:
                keep = rng.random((c.B, 1, c.SQ, c.SK)) > 0.3
                keep[:, :, 3:4] = False  # a row that sees nothing
                mask = (
                    keep
                    if c.mask == "bool8"
                    else np.where(keep, random(rng, keep.shape, "float"), -np.inf).astype(NUMPY[c.mask])
                )
            out = np.full(stored(np.empty((c.B, c.H, c.SQ, c.DV))).shape, np.nan, NUMPY[dtype])
            library.run(
                f"attention{i}", stored(q), key.held, mask, out=out, bias=value.held, keys=c.keys or c.SK, first=c.first
            )
            want = attention_reference(c, q, k, v, mask)
            got = stored(out).astype(np.float64)
            scores = 4e-6 * max(1.0, (c.DH / 64) ** 0.5)  # their rounding errors grow like a random walk
            bound = {"float": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}[dtype] * np.abs(want) + scores
            if rounds_weights(c, arch, dtype):
                bound += 2.0**-8 * attention_reference(c, q, k, np.abs(v), mask)
            assert np.isfinite(got).all()
            error = np.abs(got - want)
            assert (error <= bound).all(), f"case {i}: worst {error.max():.2e}, {(error / bound).max():.2f} bounds"
            if c.mask not in ("", "Positions"):
                assert (got[:, :, 3:4] == 0).all()
    library.handle.stop()
