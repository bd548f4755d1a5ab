"""What a program is compiled for: the limits of a target and one of its devices, chosen by name, and what the caller of
one compilation chooses.

``"cuda:sm_80"`` names a target and one of its devices; ``"cuda"`` alone stands for the device of this machine. A target
is a folder in ``npu_compiler/targets`` whose module ``devices`` holds

``CONFIG``            the target's :class:`TargetConfig`
``DEVICES``           its :class:`Device` rows: a tuple, one row for each chip or family of chips
``device_at_hand()``  the device of this machine; without one, the row that programs are compiled for by default
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from .support import dtypes, env
from .support.errors import ConfigError
from .weights.format import PANEL

ALL_REAL = frozenset(name for name, d in dtypes.DTYPES.items() if d.kind != "complex")
_REAL = ALL_REAL - {dtypes.FLOAT8}


@dataclass(frozen=True)
class Roofline:
    """The peak rates of a device, for reports.

    ``flops``: FLOP/s by the dtype of the factors; other arithmetic runs at the rate of float32. ``bandwidths``: (bytes,
    bytes per second) of its caches and its memory, the fastest first; the last entry is memory, whose size does not
    count. ``source``: the origin of the figures, in words.
    """

    flops: Mapping[str, float]
    bandwidths: tuple[tuple[float, float], ...]
    source: str

    @classmethod
    def of(cls, bandwidth: float, source: str, **flops: float) -> Roofline:
        """Return the roofline of a device without figures for its caches. ``bandwidth``: TB/s; ``flops``: TFLOP/s;
        those of int8 are also those of uint8."""
        rates = flops | {"uint8": flops["int8"]} if "int8" in flops else flops
        return cls({dtype: 1e12 * rate for dtype, rate in rates.items()}, ((math.inf, bandwidth * 1e12),), source)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of memory."""
        return self.bandwidths[-1][1]

    def peak(self, dtype: str) -> float:
        """Return FLOP/s with operands of ``dtype``; 0: unknown."""
        return self.flops.get(dtype, self.flops.get("float32", 0.0))

    def rate(self, distance: float) -> float:
        """Return bytes per second for data if ``distance`` bytes of other data were accessed since its last use."""
        return next(rate for size, rate in self.bandwidths if distance <= size)


@dataclass(frozen=True)
class Device:
    """A chip, or a family of chips that run the same code, with the properties that code generators, cost models and
    reports need.

    ``name``: the part after the colon in ``target="cuda:sm_80"``. ``chips``: products, in words. The rows of a target
    are of a subclass with the fields that this target needs. ``roofline``: None if its maker publishes no figures for
    the row, for example for CPUs, whose clock and memory differ from machine to machine. ``chunks``: those of
    ``TargetConfig`` if the device needs others than its target; None: the target's.
    """

    target: ClassVar[str] = ""
    name: str
    chips: str = ""
    roofline: Roofline | None = field(default=None, kw_only=True, compare=False, repr=False)
    chunks: tuple[int, ...] | None = field(default=None, kw_only=True)

    @property
    def spec(self) -> str:
        """The ``target=`` that chooses this device, such as 'cuda:sm_80'."""
        return f"{self.target}:{self.name}"

    def __str__(self) -> str:
        return f"{self.spec} ({self.chips})" if self.chips else self.spec

    def configured(self, config: TargetConfig) -> TargetConfig:
        """Return the ``config`` of this device's target for this device."""
        return replace(config, device=self, chunks=self.chunks or config.chunks)


@dataclass(frozen=True)
class TargetConfig:
    """Limits and preferred sizes of one target.

    Attributes:
        panel: output columns of one packed weight panel, the N width of a matmul or convolution micro-kernel. 0:
            see :attr:`packs_weights`.
        vector_lanes: float32 lanes of a vector in its generated loop nests; 0: threads compute elements. It decides
            which convolutions of few terms may become loop nests (``short_convolutions.py``). With vectors, epilogues
            keep the last dim of their result contiguous (``destination_passing.py``).
        buffer_align: byte alignment of every buffer, in the arena and outside.
        dtypes: the element types that the target can hold.
        max_rank: the maximum rank of a tensor.
        matrix_dtypes: element types of the left operands of its matmul and convolution kernels; with 'uint8', the right
            operand is int8; with 'float8_e4m3fn', a matrix whose format has such codes.
        max_head_dim: elements of a query for which it has an attention kernel; longer ones are products and a softmax.
        pair_dtypes: those of ``matrix_dtypes`` whose weights are packed in pairs along the reduced dim, for two-element
            dot products.
        prologue_rows: maximum rows of a matmul whose left operand every thread may compute itself.
        dual_gemm: whether a matmul kernel can compute two products of the same rows, for a gated activation.
        bundles: whether kernels that access different data can share a launch if they have up to ``bundle_points``
            points: for longer kernels the launch hardly counts, and separate ones show in a profile.
        residuals_in_place: whether the result of a product or convolution may take the memory of a residual that its
            epilogue reads at the same index: each element is read and then written by one thread, once.
        image_row: convolutions of up to four channels in half precision are computed on rows of this many elements
            (``image_rows.py``); 0: like any other convolution.
        chunks: tokens of a prompt that a language model's entry points take at once, besides 1.
        chunk_floor: a run takes at least as long as the arithmetic of this many tokens, because it reads all weights.
        scans_pairs: whether one scan computes a running extreme together with its position.
        asynchronous: True if execution is asynchronous to the host; greedy decoding and the top-k digest for sampling
            should then run on the device.
        float32_precisions: the values of ``CompileChoices.float32_precision`` that it has.
        device: the device that programs are compiled for; None: the target has only one.
    """

    name: str
    panel: int = PANEL
    vector_lanes: int = 0
    buffer_align: int = 64
    max_rank: int = 8
    dtypes: frozenset[str] = _REAL
    matrix_dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    max_head_dim: int = 1 << 20
    pair_dtypes: tuple[str, ...] = ("bfloat16",)
    prologue_rows: int = 0
    dual_gemm: bool = False
    bundles: bool = False
    bundle_points: int = 1 << 16
    residuals_in_place: bool = False
    image_row: int = 0
    chunks: tuple[int, ...] = (32, 128)
    chunk_floor: int = 16
    scans_pairs: bool = False
    asynchronous: bool = False
    float32_precisions: tuple[str, ...] = ("highest",)
    device: Device | None = None

    @property
    def packs_weights(self) -> bool:
        """Whether right operands of products and filters are packed into panels, by a kernel if they are computed at
        run time. Otherwise each row of a weight is an output column, and operands are read in place."""
        return self.panel > 0

    @property
    def pair_width(self) -> int:
        """Neighbouring columns of each product in the weight of a dual GEMM: a panel, or 1 without panels."""
        return self.panel or 1


@dataclass(frozen=True)
class CompileChoices:
    """The choices of one compilation that passes and the scheduler read beside the limits of its target.

    Attributes:
        float32_precision: how products and convolutions multiply float32 operands: 'highest', or 'tf32', which rounds
            them to 10 bits of fraction.
        activations: 'fp8' if rows of activations are quantised in front of matrices in fp8 formats, else None.
        speed_over_memory: whether weights in a format that products of several rows cannot read are also stored as
            elements; otherwise these products decode them in every run.
    """

    float32_precision: str = "highest"
    activations: str | None = None
    speed_over_memory: bool = False

    def check(self, config: TargetConfig) -> None:
        """Raise ``ConfigError`` if a choice is unknown, or if the target does not have it."""
        if self.float32_precision not in config.float32_precisions:
            known = ", ".join(repr(p) for p in config.float32_precisions)
            precision = f"float32_precision={self.float32_precision!r}"
            raise ConfigError(f"the {config.name} target has no {precision}; it has {known}")
        if self.activations not in (None, *dtypes.ACTIVATIONS):
            known = ", ".join(dtypes.ACTIVATIONS)
            raise ConfigError(f"activations={self.activations!r}: they can be quantised to {known}, or None")


_registered: dict[str, TargetConfig] = {}  # by name; these come before the folders
_rows: dict[str, list[Device]] = {}  # devices that were registered, by target


@cache
def _folders() -> tuple[str, ...]:
    return tuple(sorted(p.parent.name for p in (Path(__file__).parent / "targets").glob("*/devices.py")))


def _module(target: str) -> Any:
    """The ``devices`` module of a target that is a folder of this package."""
    return import_module(f".targets.{target}.devices", __package__)


def target_names() -> list[str]:
    """Return the names of all targets: the folders of ``npu_compiler/targets``, then the registered ones."""
    return [*_folders(), *(name for name in _registered if name not in _folders())]


def devices(target: str) -> list[Device]:
    """Return the devices of a target, those of its table first."""
    table = _module(target).DEVICES if target in _folders() else ()
    return [*table, *_rows.get(target, ())]


def register_device(device: Device) -> None:
    """Add a row to the table of ``device.target``: ``compile(target=device.spec)`` finds it from then on."""
    require_target(device.target)
    rows = _rows.setdefault(device.target, [])
    rows[:] = [*(d for d in rows if d.name != device.name), device]


def register_config(config: TargetConfig) -> None:
    """Make the target of ``config`` known; :func:`npu_compiler.targets.register_target` calls this."""
    _registered[config.name] = config


def require_target(name: str) -> None:
    """Raise ``ConfigError``, which lists the known targets, unless ``name`` is one of them."""
    if name not in target_names():
        raise ConfigError(f"unknown target {name!r}; known: {', '.join(target_names())}")


def split_target(target: str) -> tuple[str, str | None]:
    """Return the two parts of 'cuda:sm_80'; the second is None for 'cuda'. Raises ``ConfigError`` for anything but
    text."""
    if not isinstance(target, str):
        known = f"({', '.join(target_names())}), or one such as 'cpu:avx2'"
        raise ConfigError(f"target is of type {type(target).__name__}: pass a name {known}")
    name, colon, device = target.partition(":")
    return name, device if colon else None


def find_device(target: str, name: str) -> Device:
    """Return the device ``name`` of a target. Raises ``ConfigError``, which lists the target's devices."""
    rows = {d.name: d for d in devices(target)}
    if name not in rows:
        known = ", ".join(d.spec for d in rows.values()) or "none"
        raise ConfigError(f"target {target!r} has no device {name!r}; known: {known}")
    return rows[name]


def target_config(target: str | TargetConfig) -> TargetConfig:
    """Return the configuration for 'cuda' (the device of this machine) or 'cuda:sm_80' (that device).

    A ``TargetConfig`` is returned as it is. Raises ``ConfigError``, which lists the known names, for anything else.
    """
    if isinstance(target, TargetConfig):
        return target
    name, device = split_target(target)
    require_target(name)
    config: TargetConfig = _registered[name] if name in _registered else _module(name).CONFIG
    if device is not None:
        return find_device(name, device).configured(config)
    if name in _registered:
        return config
    at_hand: Callable[[], Device] = _module(name).device_at_hand
    return at_hand().configured(config)


def default_target() -> str:
    """Return ``NPU_TARGET``, else 'cpu'. Raises ``ConfigError`` if there is no such target or device."""
    name = env.target()
    try:
        target_config(name)
    except ConfigError as error:
        raise ConfigError(f"NPU_TARGET={name!r} is not understood: {error}") from None
    return name
