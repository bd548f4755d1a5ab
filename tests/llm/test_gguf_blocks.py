"""A GGUF file whose matrices are blocks: a program stores these very blocks, if the target reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npu_compiler.frontend.llm import open_checkpoint
from npu_compiler.weights.format import block_format, find_layout
from npu_compiler.weights.formats.q8_0 import BLOCK_BYTES
from npu_runtime.llm.loader import Loader
from npu_runtime.llm.model import LLM

from . import tiny
from .gguf_writer import write_gguf

pytest.importorskip("gguf", reason="gguf is not installed")
LENGTH = 48


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama: rows of queries and keys are reordered, three projections are merged, two alternate."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny.hf_model("llama3", max_position_embeddings=LENGTH, hidden_act="silu", head_dim=16, **sizes)
    return write_gguf(tmp_path_factory.mktemp("gguf") / "llama.gguf", model, "llama", blocks="Q8_0")


def test_the_blocks_of_the_file_are_those_of_the_program(file: Path) -> None:
    llm = LLM.load(file, max_len=LENGTH, dtype="float32", cache=False)
    formats = {b.name: b.format for b in llm.program.buffers if b.kind == "weight" and len(b.shape) == 2 and b.format}
    assert set(formats.values()) == {"q8_0.panels"} and len(formats) > 4
    weights, q8_0 = open_checkpoint(file).weights, block_format("q8_0")
    name = next(n for n in weights if "o_proj" in n)
    stored = weights.blocks(name, q8_0)
    assert stored is not None and stored.shape == (weights[name].shape[0], weights[name].shape[1] // 32 * BLOCK_BYTES)
    layout = find_layout("q8_0.panels")[1]
    packed = next(np.asarray(llm.weights[n].to_numpy()) for n in formats if n.startswith(name))
    np.testing.assert_array_equal(layout.unpack(packed, *stored.shape), stored)
    decoded, elements = q8_0.decode(stored, weights[name].shape[1]), open_checkpoint(file, "float32").weights[name]
    np.testing.assert_array_equal(decoded, elements)


def test_it_is_the_model_of_the_decoded_matrices(file: Path) -> None:
    text = tiny.text_ids(LENGTH)
    blocks, plain = (LLM.load(file, max_len=LENGTH, dtype="float32", cache=False, weights=w) for w in ("auto", None))
    assert not any(b.format for b in plain.program.buffers)
    np.testing.assert_allclose(blocks.logits(text, 40), plain.logits(text, 40), rtol=1e-3, atol=1e-4)


def test_a_target_without_a_reader_reads_elements(file: Path) -> None:
    assert open_checkpoint(file).weights.block_format == "q8_0"
    program, _, _ = Loader("metal", None, LENGTH, None, False).compile(file)
    assert {b.format for b in program.buffers} <= {"", "bf16c12.rows4"}
