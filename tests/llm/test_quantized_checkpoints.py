"""Hugging Face directories whose matrices are quantised: their numbers are those that the layouts define."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from npu_compiler.frontend.llm import load_decoder, open_checkpoint
from npu_compiler.support.errors import ConfigError, NPUError, WeightError
from npu_compiler.support.records import Field
from npu_compiler.support.text import si
from npu_compiler.weights.format import block_format
from npu_compiler.weights.quantized import compressed_tensors
from npu_runtime.llm.model import LLM
from npusim import cli

from ..support.sweeps import IN_FULL
from . import quantized_files, tiny
from .quantized_files import LAYOUTS

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
LENGTH = 48


def model(**changes: Any) -> Any:
    return tiny.hf_model("llama", max_position_embeddings=LENGTH, num_hidden_layers=1, **{**SIZES, **changes})


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_number_is_that_of_the_layout(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout, small = LAYOUTS[name], model()
    expected = quantized_files.save(small, layout, tmp_path)
    checkpoint = open_checkpoint(tmp_path, "float32")
    weights, owners = checkpoint.weights, dict(checkpoint.config.column_orders)
    formats = weights.block_formats
    assert bool(caplog.messages) == (not layout.formats)
    assert set(formats.values()) == layout.formats and set(formats) == (set(expected) if layout.formats else set())
    for key, matrix in expected.items():
        owner = owners.get(key.removesuffix(".weight"))
        matrix = matrix if owner is None else matrix[:, weights[f"{owner}.order"]]
        np.testing.assert_array_equal(weights[key], matrix.numpy(), key)
        if key in formats:
            format = block_format(formats[key])
            blocks = weights.blocks(key, format)
            assert blocks is not None
            np.testing.assert_array_equal(format.decode(blocks, matrix.shape[1]), matrix.numpy(), key)
    state = small.state_dict()
    for key in (
        set(weights) - set(expected) - {f"{o}.order" for o in owners.values()}
    ):  # embeddings, norms and the output projection keep their numbers
        np.testing.assert_array_equal(weights[key], state[key].numpy())


SAMPLE = ("gptq-order",)


@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(n, marks=IN_FULL) for n in LAYOUTS if n not in SAMPLE)])
def test_the_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    small, text = model(), tiny.text_ids(LENGTH)
    quantized_files.save(small, LAYOUTS[name], tmp_path)
    llm = LLM.load(tmp_path, max_len=LENGTH, dtype="float32", cache=False)
    stored = {b.format.partition(".")[0] for b in llm.program.buffers if b.kind == "weight" and b.format}
    assert stored - {"bf16c12"} == LAYOUTS[name].formats
    with torch.no_grad():
        expected = small(torch.tensor([text])).logits[0].numpy()
    np.testing.assert_allclose(llm.logits(text, 40), expected[39:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["cohere", "phi3"])  # rows of queries in another order, fused projections
@pytest.mark.parametrize("name", ["awq", "gptq-order"])
def test_rows_of_quantised_matrices_may_be_reordered_and_fused(family: str, name: str, tmp_path: Path) -> None:
    small = tiny.hf_model(family, max_position_embeddings=LENGTH, num_hidden_layers=1, **SIZES)
    quantized_files.save(small, LAYOUTS[name], tmp_path)
    checkpoint, text = open_checkpoint(tmp_path, "float32"), tiny.text_ids(20)
    assert set(checkpoint.weights.block_formats.values()) == LAYOUTS[name].formats
    with torch.inference_mode():
        found = load_decoder(checkpoint, LENGTH)(torch.tensor([text]), torch.arange(20), torch.tensor([19]))
        expected = small(torch.tensor([text])).logits[0, -1:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_describe_says_what_a_checkpoint_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matrices = quantized_files.save(model(), LAYOUTS["packed-8"], tmp_path)
    assert cli.main(["describe", str(tmp_path)]) == 0
    size = sum(m.numel() + 4 * len(m) for m in matrices.values())
    assert capsys.readouterr().out.endswith(f"weights by format: int8 {si(size, 'B')}, bfloat16 {si(49_920, 'B')}\n")
    assert cli.main(["describe", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["bytes_by_format"] == {"int8": size, "bfloat16": 49_920}
    assert cli.main(["describe", str(tmp_path), "--counts"]) != 0 and "compile the model" in capsys.readouterr().err


def test_projections_of_one_input_share_the_order_of_their_columns(tmp_path: Path) -> None:
    """An order that a sibling does not have is its own; one that no order of columns makes runs is left alone."""
    quantized_files.save(model(), LAYOUTS["gptq-order"], tmp_path)
    path, layer = tmp_path / "model.safetensors", "model.layers.0."
    parts = {
        "self_attn.k_proj": "self_attn.q_proj",
        "self_attn.v_proj": "self_attn.q_proj",
        "mlp.up_proj": "mlp.gate_proj",
    }
    owners = dict(open_checkpoint(tmp_path).config.column_orders)
    assert len(owners) == 7 and all(
        owner == f"{layer}{parts.get(m.removeprefix(layer), m.removeprefix(layer))}" for m, owner in owners.items()
    )
    tensors = safetensors.torch.load_file(path)
    tensors[f"{layer}self_attn.v_proj.g_idx"] = tensors[f"{layer}self_attn.v_proj.g_idx"].flip(0)
    tensors[f"{layer}mlp.down_proj.g_idx"][:] = 3  # all columns in one of several groups
    safetensors.torch.save_file(tensors, path)
    checkpoint = open_checkpoint(tmp_path)
    owners = dict(checkpoint.config.column_orders)
    assert owners[f"{layer}self_attn.v_proj"] == f"{layer}self_attn.v_proj" and f"{layer}mlp.down_proj" not in owners
    assert checkpoint.weights.block_format(f"{layer}mlp.down_proj.weight") is None


# -- what cannot be read ----------------------------------------------------------------------------------------------
KEY = "model.layers.0.mlp.up_proj"
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def _set(**settings: Any) -> Change:
    return lambda config, tensors: config.update(settings)


def _tensor(leaf: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def apply(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{KEY}.{leaf}"] = change(tensors[f"{KEY}.{leaf}"]).contiguous()

    return apply


def _without(leaf: str) -> Change:
    return lambda config, tensors: tensors.__delitem__(f"{KEY}.{leaf}")


def _twice(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{KEY}.weight"] = torch.zeros(384, 128)


def _nothing(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in [n for n in tensors if n.endswith(("qweight", "qzeros", "scales"))]:
        del tensors[name]


METHODS = r"supported are awq, gptq, compressed-tensors, fp8, and GGUF files"
BAD: list[tuple[str, Change, type[NPUError], str]] = [
    ("awq", _set(quant_method="bitsandbytes"), ConfigError, rf"quant_method = 'bitsandbytes' .*{METHODS}"),
    ("awq", lambda config, tensors: config.pop("quant_method"), ConfigError, rf"quant_method = None .*{METHODS}"),
    ("awq", _set(version="gemv"), ConfigError, r"quantization_config\.version = 'gemv' is not supported; known: gemm"),
    ("awq", _set(bits=3), ConfigError, r"quantization_config\.bits = 3 is not supported; known: 4"),
    ("awq", _set(zero_point=False), ConfigError, r"zero_point = False is not supported; known: True"),
    ("awq", _set(group_size=0), ConfigError, r"group_size: expected a whole number from 1 "),
    ("awq", _set(group_size=48), WeightError, r"_proj\.scales' is F16.* not of \d+ columns in groups of 48; the f"),
    ("awq", _set(group_size=-1), WeightError, r"not of \d+ columns in groups of a row"),
    ("awq", _without("scales"), WeightError, rf"lacks '{KEY}\.scales', a part of a quantised matrix"),
    ("awq", _tensor("qzeros", lambda x: x[:, :-1]), WeightError, rf"'{KEY}\.qzeros' is I32\[4, 47\], not \[4, 48\]"),
    ("awq", _tensor("qweight", lambda x: x.long()), WeightError, rf"'{KEY}\.qweight' is I64.*not I32 of 2 dims"),
    ("awq", _tensor("qweight", lambda x: x[:64]), WeightError, rf"{KEY}\.scales' .* not of 64 columns in groups of 32"),
    ("awq", _tensor("scales", lambda x: x * torch.nan), WeightError, rf"'{KEY}\.scales' is .*, not finite"),
    ("awq", _twice, WeightError, rf"has '{KEY}' twice: as '{KEY}\.weight' and quantised"),
    ("awq", _nothing, WeightError, r"quantization_config says awq, but no tensor is quantised"),
    ("gptq", _set(bits=3), ConfigError, r"quantization_config\.bits = 3 is not supported; known: 4, 8"),
    ("gptq", _set(checkpoint_format="marlin"), ConfigError, r"checkpoint_format = 'marlin' .*known: gptq, gptq_v2"),
    ("gptq", _tensor("g_idx", lambda x: x + 1), WeightError, rf"'{KEY}\.g_idx' .* not numbers of 4 groups"),
    ("gptq", _tensor("bias", lambda x: x + 1), WeightError, rf"has 1 tensor\(s\) that no llama model.*'{KEY}\.bias'"),
    ("packed", _set(format="nvfp4-pack-quantized"), ConfigError, r"format = 'nvfp4-.*known: pack-quant"),
    ("packed", _set(sparsity_config={"format": "sparse-24-bitmask"}), ConfigError, r"sparsity_config is not"),
    ("packed", _tensor("weight_shape", lambda x: x * 2**40), WeightError, r"not numbers of 4 or 8 bits of a matrix"),
    ("float", _tensor("weight_scale", lambda x: x[1:]), WeightError, r"not one number, a number for each row"),
    ("fp8-block", _set(weight_block_size=[64, 64]), WeightError, r"for blocks of 64 × 64 of"),
    ("fp8-block", _set(weight_block_size="128"), ConfigError, r"weight_block_size: expected a list"),
    ("fp8", _set(fmt="e5m2"), ConfigError, r"fmt = 'e5m2' is not supported; known: e4m3"),
]  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in {bad[0] for bad in BAD}}
    for name, folder in folders.items():
        quantized_files.save(model(), LAYOUTS[name], folder)
    return folders


@pytest.mark.parametrize(("name", "change", "error", "message"), BAD)
def test_one_typed_error_says_what_is_wrong(
    name: str, change: Change, error: type[NPUError], message: str, written: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((written[name] / "config.json").read_text())
    tensors = safetensors.torch.load_file(written[name] / "model.safetensors")
    change(config["quantization_config"], tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(error, match=message):
        weights = open_checkpoint(tmp_path).weights
        dict(weights.block_formats)


def test_a_file_of_eight_bit_floats_needs_its_config(written: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((written["fp8"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "quantization_config"}))
    (tmp_path / "model.safetensors").write_bytes((written["fp8"] / "model.safetensors").read_bytes())
    with pytest.raises(WeightError, match=r"has dtype F8_E4M3.*"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, "fp8"), ({"dynamic": False}, None), ({"strategy": "tensor"}, None), ({"type": "int"}, None), (None, None)],
)
def test_activations_that_a_checkpoint_was_made_for(changes: dict[str, Any] | None, expected: str | None) -> None:
    said = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"targets": ["Linear"], "input_activations": None if changes is None else said | changes}
    settings = Field({"config_groups": {"group_0": group}}, "quantization_config", ConfigError).mapping()
    assert compressed_tensors.activations(settings) == expected
    assert compressed_tensors.activations({}) is None
