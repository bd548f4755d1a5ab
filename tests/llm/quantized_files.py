"""Models of transformers as directories of quantised weights, in the layouts of AutoAWQ, AutoGPTQ and GPTQModel,
compressed-tensors, and transformers' fp8. Written from the descriptions of these layouts, number by number."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

Tensors = dict[str, torch.Tensor]  # of a module, by the last part of their names
Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]  # weight -> (tensors, the weight that they stand for)


@dataclass(frozen=True)
class Layout:
    """``config``: the quantization_config. ``quantise``: for one weight [N, K]. ``formats``: of the matrices."""

    config: dict[str, Any]
    quantise: Quantise
    formats: set[str]
    dtype: torch.dtype = field(default=torch.float16)  # of all other weights


def rounded(
    w: torch.Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [N, K] from 0 on, scales and zeros [N, groups], and the weight that they stand for."""
    n, k = w.shape
    group, top = k if group == -1 else group, 2**bits - 1
    parts = w.reshape(n, -1, group)
    if symmetric:
        scales = (parts.abs().amax(-1) / (top / 2)).to(dtype)
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = ((high - low) / top).to(dtype)
        zeros = (-low / scales.float()).round().clamp(1, top).long()
    codes = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top).long()
    back = (codes - zeros[..., None]).float() * scales.float()[..., None]
    return codes.reshape(n, k), scales, zeros, back.reshape(n, k)


def words(codes: torch.Tensor, bits: int, places: list[int] | None = None) -> torch.Tensor:
    """Pack the last dim into int32; number ``places[i]`` of a word is in its bits from i * bits on."""
    count = 32 // bits
    parts = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % count)).reshape(*codes.shape[:-1], -1, count)
    total = torch.zeros(parts.shape[:-1], dtype=torch.int64)
    for i, place in enumerate(places or range(count)):
        total |= parts[..., place].long() << (i * bits)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32).contiguous()


def awq(group: int) -> Quantise:
    def quantise(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, back = rounded(w, 4, group, False)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        packed = {"qweight": words(codes.T, 4, order), "qzeros": words(zeros.T, 4, order)}
        return {**packed, "scales": scales.T.contiguous()}, back

    return quantise


def gptq(bits: int, group: int, symmetric: bool, stored_zero: int, act_order: bool = False) -> Quantise:
    """``stored_zero``: what is added to stored zero points."""

    def quantise(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size, k = (w.shape[1] if group == -1 else group), w.shape[1]
        # The order of the columns in which groups are runs: that of their inputs, which siblings share.
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if act_order else torch.arange(k)
        codes, scales, zeros, back = rounded(w[:, order], bits, group, symmetric)
        groups = torch.empty(k, dtype=torch.int32)
        groups[order] = (torch.arange(k) // size).int()
        place = torch.argsort(order)
        codes, back = codes[:, place], back[:, place]
        tensors = {
            "qweight": words(codes, bits).T.contiguous(),
            "qzeros": words((zeros.T - stored_zero) % 2**bits, bits),
            "scales": scales.T.contiguous(),
            "g_idx": groups,
            "bias": torch.zeros(len(w), dtype=torch.float16),  # as AutoGPTQ gives it to all modules
        }
        return tensors, back

    return quantise


def packed(bits: int, group: int, symmetric: bool, dtype: torch.dtype = torch.bfloat16) -> Quantise:
    """compressed-tensors' 'pack-quantized'."""

    def quantise(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, back = rounded(w, bits, group, symmetric, dtype)
        tensors = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(w.shape)}
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        return tensors, back

    return quantise


def int8(symmetric: bool) -> Quantise:
    """compressed-tensors' 'int-quantized'."""

    def quantise(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, back = rounded(w, 8, -1, symmetric, torch.bfloat16)
        tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return tensors, back

    return quantise


def fp8(rows: int, columns: int, leaf: str, dtype: torch.dtype = torch.float32, scalar: bool = False) -> Quantise:
    """Scales for blocks of rows and columns; 0: all of them."""

    def quantise(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = w.shape
        high, wide = rows or n, columns or k
        scales = torch.empty(-(-n // high), -(-k // wide), dtype=dtype)
        numbers, back = torch.empty(n, k, dtype=torch.float8_e4m3fn), torch.empty(n, k)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * high, i * high + high), slice(j * wide, j * wide + wide)
                scales[i, j] = w[at].abs().max() / 448
                numbers[at] = (w[at] / scales[i, j].float()).clamp(-448, 448).to(torch.float8_e4m3fn)
                back[at] = numbers[at].float() * scales[i, j].float()
        extra = {"input_scale": torch.tensor(0.5)} if scalar else {}
        return {"weight": numbers, leaf: scales.reshape(()) if scalar else scales, **extra}, back

    return quantise


def quantised(state: Tensors, layout: Layout) -> tuple[Tensors, Tensors]:
    """Return the tensors of a file with all matrices of a model's layers quantised, and these matrices by name with the
    numbers that they stand for."""
    torch.manual_seed(1)
    tensors, matrices = {}, {}
    for name, value in state.items():
        if value.ndim == 2 and ".layers." in name:
            parts, matrices[name] = layout.quantise(value)
            tensors |= {f"{name.removesuffix('weight')}{leaf}": part for leaf, part in parts.items()}
        else:
            tensors[name] = value.to(layout.dtype)
    return tensors, matrices


def save(model: Any, layout: Layout, folder: Path) -> Tensors:
    """Write a model, and give it the numbers that its file stands for. Returns its quantised matrices by name."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(layout.dtype).float()
    tensors, matrices = quantised(model.state_dict(), layout)
    model.load_state_dict({**model.state_dict(), **matrices})
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_dict(), "dtype": str(layout.dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": layout.config}))
    return matrices


_AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
_GPTQ = {
    "quant_method": "gptq",
    "desc_act": False,
    "damp_percent": 0.01,
    "true_sequential": True,
    "static_groups": False,
}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def _compressed(format: str, **weights: Any) -> dict[str, Any]:
    if weights["strategy"] == "block":
        weights["block_structure"] = [128, 128]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


BF16 = torch.bfloat16
LAYOUTS = {
    "awq": Layout({**_AWQ, "group_size": 32}, awq(32), {"int4_g32_zp"}),
    "awq-rows": Layout({**_AWQ, "group_size": -1, "version": "GEMM"}, awq(-1), {"int4_g128_zp"}),
    "gptq": Layout({**_GPTQ, "bits": 4, "group_size": 32, "sym": True}, gptq(4, 32, True, 1), {"int4_g32"}),
    "gptq-asymmetric": Layout(
        {**_GPTQ, "bits": 4, "group_size": 64, "sym": False, "checkpoint_format": "gptq"},
        gptq(4, 64, False, 1), {"int4_g64_zp"},
    ),
    "gptq-v2": Layout(
        {**_GPTQ, "bits": 4, "group_size": 128, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(4, 128, False, 0), {"int4_g128_zp"},
    ),
    "gptq-8": Layout({**_GPTQ, "bits": 8, "group_size": 64, "sym": True}, gptq(8, 64, True, 1), {"int8_g64"}),
    "gptq-8-rows": Layout({**_GPTQ, "bits": 8, "group_size": -1, "sym": False}, gptq(8, -1, False, 1), {"int8_zp"}),
    "gptq-order": Layout(
        {**_GPTQ, "bits": 4, "group_size": 32, "sym": True, "desc_act": True}, gptq(4, 32, True, 1, True), {"int4_g32"}
    ),
    "packed": Layout(
        _compressed("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32),
        packed(4, 32, True), {"int4_g32"}, BF16,
    ),
    "packed-asymmetric": Layout(
        _compressed("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=128),
        packed(4, 128, False), {"int4_g128_zp"}, BF16,
    ),
    "packed-8": Layout(
        _compressed("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
        packed(8, -1, True), {"int8"}, BF16,
    ),
    "packed-float32": Layout(  # scales that float16 does not hold
        _compressed("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32),
        packed(4, 32, True, torch.float32), set(), BF16,
    ),
    "int8": Layout(
        _compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
        int8(True), {"int8"}, BF16,
    ),
    "int8-asymmetric": Layout(
        _compressed("int-quantized", num_bits=8, type="int", symmetric=False, strategy="channel"),
        int8(False), {"int8_zp"}, BF16,
    ),
    "float": Layout(
        _compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel"),
        fp8(1, 0, "weight_scale", BF16), {"fp8_e4m3"}, BF16,
    ),
    "float-block": Layout(
        _compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="block"),
        fp8(128, 128, "weight_scale", BF16), {"fp8_e4m3", "fp8_e4m3_b128"}, BF16,
    ),
    "fp8-block": Layout(
        {**_FP8, "weight_block_size": [128, 128]},
        fp8(128, 128, "weight_scale_inv"), {"fp8_e4m3", "fp8_e4m3_b128"}, BF16,
    ),
    "fp8": Layout({**_FP8, "weight_block_size": None}, fp8(0, 0, "weight_scale", scalar=True), {"fp8_e4m3"}, BF16),
}  # fmt: skip
