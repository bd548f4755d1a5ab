"""Model directories with quantised weights: the quantization_config, the list of tensors and their bytes changed."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.numpy
import safetensors.torch
import torch

from npu_compiler.frontend.llm import open_checkpoint

from ...llm import quantized_files
from .. import model_files
from ..mutations import mutate_bytes, mutate_tree

_LAYOUTS = ("awq", "awq-rows", "gptq", "gptq-order", "gptq-8-rows", "packed", "packed-8", "int8-asymmetric", "float",
            "fp8-block", "fp8")  # fmt: skip
_SETTINGS = (
    *("awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes", "gptq_v2", "gemm", "gemv", "pack-quantized"),
    *("int-quantized", "dense", "128x128", "e4m3", -1, 4, 8, 32, 64, [64, 64], [0, 1], True, {"format": "dense"}),
)
_HEADERS = ("I32", "I8", "F8_E4M3", "F16", "BF16", "I64", [32, 4], [1, 4], [4], [], [0, 4])


@cache
def _model(name: str) -> tuple[dict[str, Any], bytes]:
    documents, layout = model_files.directory("llama"), quantized_files.LAYOUTS[name]
    state = {k: torch.from_numpy(v) for k, v in safetensors.numpy.load(documents["model.safetensors"]).items()}
    tensors, _ = quantized_files.quantised(state, layout)
    return {**documents["config.json"], "quantization_config": layout.config}, safetensors.torch.save(tensors)


def case(rng: random.Random, folder: Path) -> None:
    config, data = copy.deepcopy(_model(rng.choice(_LAYOUTS)))
    for _ in range(rng.choice((1, 1, 2))):
        match rng.randrange(4):
            case 0:
                mutate_tree(rng, config["quantization_config"], _SETTINGS)
            case 1:
                data = _with_header(rng, data)
            case 2:
                data = mutate_bytes(rng, data)
            case _:  # in the numbers
                at = rng.randrange(len(data) // 2, len(data))
                data = data[:at] + mutate_bytes(rng, data[at:])[: len(data) - at].ljust(len(data) - at, b"\xff")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(data)
    model_files.use_checkpoint(open_checkpoint(folder, rng.choice((None, "float32"))))


def _with_header(rng: random.Random, data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError:  # it is damaged already
        return data
    mutate_tree(rng, header, _HEADERS)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]
