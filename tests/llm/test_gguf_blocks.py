"""A GGUF file whose matrices are blocks: a program stores these very blocks, if the target reads them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from npu_compiler.frontend.llm import open_checkpoint
from npu_compiler.support.errors import WeightError
from npu_compiler.weights.files import BLOCKS, open_weights
from npu_compiler.weights.format import block_format, find_layout
from npu_runtime.llm.loader import Loader, save_manifest
from npu_runtime.llm.model import LLM
from npusim.program_files import save_program

from ..support.metal_backend import EmulatedMetal
from ..support.sweeps import IN_FULL
from . import tiny
from .gguf_writer import write_gguf

pytest.importorskip("gguf", reason="gguf is not installed")
LENGTH = 48
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q5_1", "ffn_up": "F16", "token_embd": "Q6_K", "": "Q4_K"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama: rows of queries and keys are reordered, three projections are merged, two alternate."""
    return _written(tmp_path_factory.mktemp("gguf"), "Q8_0")


def _written(folder: Path, blocks: str | Mapping[str, str], width: int = 64) -> Path:
    sizes = {
        "hidden_size": width, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }  # fmt: skip
    model = tiny.hf_model("llama3", max_position_embeddings=LENGTH, hidden_act="silu", head_dim=width // 4, **sizes)
    return write_gguf(folder / "llama.gguf", model, "llama", blocks=blocks)


@pytest.fixture(scope="module")
def blocks(file: Path) -> LLM:
    return LLM.load(file, max_len=LENGTH, dtype="float32", cache=False)


def test_the_blocks_of_the_file_are_those_of_the_program(file: Path, blocks: LLM) -> None:
    llm = blocks
    formats = {b.name: b.format for b in llm.program.buffers if b.kind == "weight" and len(b.shape) == 2 and b.format}
    assert set(formats.values()) == {"q8_0.panels"} and len(formats) > 4
    weights, q8_0 = open_checkpoint(file).weights, block_format("q8_0")
    name = next(n for n in weights if "o_proj" in n)
    stored = weights.blocks(name, q8_0)
    assert stored is not None and stored.shape == (weights[name].shape[0], weights[name].shape[1] // 32 * 34)
    layout = find_layout("q8_0.panels")[1]
    packed = next(np.asarray(llm.weights[n].to_numpy()) for n in formats if n.startswith(name))
    np.testing.assert_array_equal(layout.unpack(packed, *stored.shape), stored)
    decoded, elements = q8_0.decode(stored, weights[name].shape[1]), open_checkpoint(file, "float32").weights[name]
    np.testing.assert_array_equal(decoded, elements)


def test_it_is_the_model_of_the_decoded_matrices(file: Path, blocks: LLM) -> None:
    text = tiny.text_ids(LENGTH)
    plain = LLM.load(file, max_len=LENGTH, dtype="float32", cache=False, weights=None)
    assert not any(b.format for b in plain.program.buffers)
    np.testing.assert_allclose(blocks.logits(text, 40), plain.logits(text, 40), rtol=1e-3, atol=1e-4)


def test_the_kernels_of_gpus_read_the_blocks_of_the_file(file: Path) -> None:
    formats = open_checkpoint(file).weights.block_formats
    assert set(formats.values()) == {"q8_0"} and {b for b in formats if "norm" in b} == set()
    program, _, _ = Loader("metal", None, LENGTH, None, False).compile(file)
    assert {b.format for b in program.buffers} == {"", "q8_0.rows"}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(tmp_path_factory.mktemp("mixed"), MIXED, 256)


def test_every_matrix_keeps_the_type_that_it_has_in_the_file(mixed: Path) -> None:
    llm, plain = (LLM.load(mixed, max_len=LENGTH, dtype="float32", cache=False, weights=w) for w in ("auto", None))
    found = {b.name: b.format.partition(".")[0] for b in llm.program.buffers if b.format}
    parts = {"v_proj": "q6_k", "down_proj": "q5_1", "embed_tokens": "q6_k"}
    for name, format in found.items():
        assert format == next((f for part, f in parts.items() if part in name), "q4_k")
    assert {*found.values()} == {"q4_k", "q5_1", "q6_k"} and not any("up_proj" in name for name in found)
    text = tiny.text_ids(LENGTH)
    np.testing.assert_allclose(llm.logits(text, 40), plain.logits(text, 40), rtol=1e-3, atol=1e-4)


@IN_FULL
def test_the_kernels_of_gpus_compute_with_the_blocks_of_the_file(mixed: Path) -> None:
    """A prompt, for which the blocks are decoded, and single tokens, in the emulator."""
    loader = Loader("metal", None, LENGTH, EmulatedMetal(checks=False), False)
    gpu, cpu = LLM(*loader.load(mixed), loader.backend), LLM.load(mixed, max_len=LENGTH, cache=False)
    assert {b.format.partition(".")[0] for b in gpu.program.buffers} >= {"q4_k", "q5_1", "q6_k"}
    text = tiny.text_ids(LENGTH)[:20]
    theirs = cpu.logits(text, 12)
    assert np.abs(gpu.logits(text, 12) - theirs).max() <= 0.01 * np.abs(theirs).max()


def test_a_compiled_model_has_the_blocks_of_the_file(mixed: Path, tmp_path: Path) -> None:
    """Encoding its elements again would change them."""
    program, weights, manifest = Loader("cpu", "float32", LENGTH, None, False).compile(mixed)
    target, beside = save_program(program, weights, tmp_path / "llama.npubin")
    save_manifest(manifest, target)
    file = open_weights(beside)
    key = next(n for n in weights if "v_proj" in n)
    assert file.spec(key) == weights.spec(key)
    np.testing.assert_array_equal(file.blocks(key, block_format("q6_k")), weights.blocks(key, block_format("q6_k")))
    np.testing.assert_array_equal(file.read(key).view(np.uint8), weights[key].view(np.uint8))
    text = tiny.text_ids(LENGTH)
    first, second = LLM(program, weights, manifest), LLM.load(target, max_len=LENGTH, cache=False)
    np.testing.assert_array_equal(first.logits(text, 40), second.logits(text, 40))


@pytest.mark.parametrize(
    "table", ["x", "[]", '{"a": 1}', '{"a": ["q5_1", 7, "float32"]}', '{"a": ["q9", 32, "float32"]}']
)
def test_a_damaged_table_of_blocks_is_refused(table: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"a": np.zeros((2, 24), np.uint8)}, path, {BLOCKS: table})
    with pytest.raises(WeightError, match=r"a\.safetensors: metadata 'npusim\.blocks': "):
        open_weights(path)


def test_rows_that_are_not_whole_blocks_are_refused(file: Path, tmp_path: Path) -> None:
    data = bytearray(file.read_bytes())
    name = b"blk.0.ffn_down.weight"
    at = data.index(name) + len(name) + 4
    data[at : at + 8] = struct.pack("<Q", 100)
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(WeightError, match=r"'blk\.0\.ffn_down\.weight' has rows of 100 elements.*whole blocks of q8_0"):
        open_checkpoint(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WeightError, match="truncated"):
        open_checkpoint(tmp_path / "a.gguf")


def test_a_type_that_nothing_decodes_is_refused_before_weights_are_read(file: Path, tmp_path: Path) -> None:
    data = bytearray(file.read_bytes())
    name = b"blk.0.ffn_down.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the rank and the shape
    data[at : at + 4] = struct.pack("<I", 99)
    (tmp_path / "a.gguf").write_bytes(data)
    message = r"a\.gguf: tensor 'blk\.0\.ffn_down\.weight': GGUF type 99 is unknown; known are float32, .*q4_k.*; conv"
    with pytest.raises(WeightError, match=message):
        open_checkpoint(tmp_path / "a.gguf")
