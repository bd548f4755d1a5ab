"""Configs in all spellings, checkpoints in all formats, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_compiler.frontend.llm import Checkpoint, LLMConfig, load_decoder, open_checkpoint, parameter_shapes
from npu_compiler.frontend.llm.modules import inverse_frequencies
from npu_compiler.frontend.llm.vocabulary import byte_level_bpe
from npu_compiler.support.errors import ConfigError, WeightError
from npusim.models import llm_weights
from npusim.models.download import RegistryUnavailable

from . import tiny
from .gguf_writer import write_gguf

# ------------------------------------------------------------------------------------------------------------- configs

LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GEMMA4 = {  # as transformers 4 wrote it
    **LLAMA, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 2,
    "rope_theta": 1e6, "rope_local_base_freq": 10_000.0, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA5 = {
    **LLAMA, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 9, "dtype": "bfloat16",
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"factor": 8.0, "rope_type": "linear", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}  # fmt: skip
SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def test_both_spellings_mean_the_same() -> None:
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALED}, "torch_dtype": "float16"}
    new = {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALED}, "dtype": "float16"}
    assert LLMConfig.from_hf(old) == LLMConfig.from_hf(new)
    assert LLMConfig.from_hf(old).dtype == "float16"
    assert LLMConfig.from_hf(old).rope.theta == 5e5
    assert LLMConfig.from_hf(GEMMA4) == LLMConfig.from_hf(GEMMA5)
    nested = {"model_type": "gemma3", "text_config": GEMMA4, "vision_config": {"hidden_size": 1}}
    assert LLMConfig.from_hf(nested) == LLMConfig.from_hf(GEMMA4)
    assert LLMConfig.from_hf(GEMMA4).windows == (9, None)
    assert LLMConfig.from_hf(GEMMA4).tied_embedding


def test_the_identity_of_an_architecture_names_what_is_not_default() -> None:
    llama, gemma = LLMConfig.from_hf(LLAMA), LLMConfig.from_hf(GEMMA4)
    assert llama.identity() == LLMConfig.from_hf(dict(LLAMA)).identity() != gemma.identity()
    assert "residual_scale" not in llama.identity() and "hidden_size" in llama.identity()
    assert dataclasses.replace(llama, residual_scale=0.5).identity() != llama.identity()


def test_config_is_a_value() -> None:
    assert len({LLMConfig.from_hf(LLAMA), LLMConfig.from_hf(dict(LLAMA)), LLMConfig.from_hf(GEMMA4)}) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"model_type = 'mamba' is not supported; known: cohere, "),
        ({"hidden_act": "elu"}, r"hidden_act = 'elu' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"rope_scaling\.rope_type = 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, r"rope_scaling\.factor: expected a number, got '2'"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, r"rope_parameters\.mrope_section"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5 is not supported"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config = .* is not supported"),
        ({"num_local_experts": 8}, r"num_local_experts = 8 is not supported"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30\.0 is not supported"),
        ({"torch_dtype": "float8_e4m3fn"}, r"torch_dtype = 'float8_e4m3fn' is not supported; known: float32, float16"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads = 4 does not divide the 6 attention heads"),
        ({"hidden_size": None}, r"hidden_size is missing"),
        ({"vocab_size": True}, r"vocab_size: expected a whole number from 1 to 2147483647, got True"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings: expected true or false, got 'yes'"),
        ({"head_dim": 7}, r"rotate 7 of a head's 7 elements; that must be even"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 2}, r"layer_types = 'chunked_attention'"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, r"no sliding_window is in use"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, r"layer_types is not a list of 2 layer types"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, r"use_bidirectional_attention = True"),
        ({"model_type": "gemma3", "text_config": [1]}, r"text_config: expected an object, got a list"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
         r"rope_scaling\.short_factor: expected a list of 4, got one of 1"),
        ({"num_hidden_layers": 2**31}, r"num_hidden_layers: expected a whole number from 1 to 4096, got 2147483648"),
        ({"num_hidden_layers": 10**30}, r"num_hidden_layers: expected a whole number from 1 to 4096"),
        ({"num_hidden_layers": 10**400}, r"num_hidden_layers: .* got a 1329-bit integer"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps: expected a number that a float can hold"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps: expected a finite number from 0 on, got nan"),
        ({"model_type": "qwen3", "layer_types": [[]] * 2}, r"layer_types\[0\]: expected a text"),
        ({"layer_types": 3}, r"layer_types: expected a list, got 3"),
        ({"model_type": ["llama"]}, r"model_type: expected a text"),
        ({"model_type": "phi3", "partial_rotary_factor": 1e308}, r"partial_rotary_factor = 1e\+308 is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1}},
         r"original_max_position_embeddings = 1: it takes 2 or more"),
    ],
)  # fmt: skip
def test_what_a_config_must_not_say(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMConfig.from_hf({**LLAMA, **changes})


@pytest.mark.parametrize("name", ["llama3", "linear", "qwen2-yarn", "qwen3", "phi3-partial"])
def test_frequencies_are_those_of_transformers_to_the_bit(name: str) -> None:
    model = tiny.hf_model(name)
    rope = LLMConfig.from_hf(model.config.to_dict()).rope
    expected = model.model.rotary_emb
    torch.testing.assert_close(inverse_frequencies(rope, 64), expected.inv_freq, rtol=0, atol=0)
    assert rope.attention_factor == pytest.approx(expected.attention_scaling)


# --------------------------------------------------------------------------------------------------------- directories


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "gemma3_text", "cohere", "gpt_neox", "gpt2", "starcoder2"])
def test_directories_of_transformers(name: str, tmp_path: Path) -> None:
    ours, theirs = tiny.decoder(name, 8)
    checkpoint = open_checkpoint(tiny.save(theirs, tmp_path, "40KB"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert checkpoint.config == ours.config
    assert list(checkpoint.weights) == list(parameter_shapes(ours.config))
    expected = ours.state_dict()
    for key, array in checkpoint.weights.items():
        assert array.shape == checkpoint.weights.spec(key)[0]
        np.testing.assert_array_equal(array, expected[key].numpy())
    assert checkpoint.eos_ids == (2,)
    assert checkpoint.bos_id == 1
    with torch.no_grad():
        args = (torch.tensor([[7, 8, 9]]), torch.arange(3), torch.tensor([2]))
        assert torch.equal(load_decoder(checkpoint, 8)(*args), ours(*args))


def test_multimodal_gemma_is_its_text_model(tmp_path: Path) -> None:
    ours, theirs = tiny.decoder("gemma3_text", 8)
    state = {k.replace("model.", "language_model.model.", 1): v for k, v in theirs.state_dict().items()}
    state.pop("lm_head.weight")
    save_file({**state, "vision_tower.patch.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    text = {**theirs.config.to_dict(), "dtype": None}
    tiny.edit(tmp_path, model_type="gemma3", text_config=text, torch_dtype="bfloat16", eos_token_id=[1, 106])
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.dtype == "bfloat16"
    assert checkpoint.eos_ids == (1, 106)
    expected = ours.state_dict()["model.norm.weight"].bfloat16().float()
    np.testing.assert_array_equal(checkpoint.weights["model.norm.weight"].astype(np.float32), expected.numpy())


def test_dtype_is_the_callers_else_the_configs_else_the_files(tmp_path: Path) -> None:
    _, theirs = tiny.decoder("llama", 4)
    tiny.save(theirs.half(), tmp_path)
    assert open_checkpoint(tmp_path).config.dtype == "float16"
    tiny.edit(tmp_path, dtype="bfloat16")
    assert open_checkpoint(tmp_path).weights["model.norm.weight"].dtype.name == "bfloat16"
    tiny.edit(tmp_path, drop=("dtype",))
    assert open_checkpoint(tmp_path).config.dtype == "float16"
    assert open_checkpoint(tmp_path, "float32").weights["model.norm.weight"].dtype == np.float32
    with pytest.raises(ConfigError, match=r"dtype 'int8': .*float32, float16, bfloat16 only"):
        open_checkpoint(tmp_path, "int8")


def test_generation_settings(tmp_path: Path) -> None:
    _, theirs = tiny.decoder("llama", 4)
    tiny.save(theirs, tmp_path)
    tiny.edit(tmp_path, "generation_config.json", temperature=0.7, top_k=20, eos_token_id=[2, 5])
    chats = [{"name": "tool", "template": "no"}, {"name": "default", "template": "{{ messages }}"}]
    tiny.edit(tmp_path, "tokenizer_config.json", chat_template=chats, bos_token={"content": "<s>"}, eos_token="</s>")
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(96))
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.generation["temperature"], checkpoint.generation["top_k"]) == (0.7, 20)
    assert checkpoint.eos_ids == (2, 5)
    assert checkpoint.chat_template == "{{ messages }}"
    assert checkpoint.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert checkpoint.tokenizer_json == tokenizer_json(96)
    assert {p.name for p in checkpoint.files} >= {"config.json", "model.safetensors", "tokenizer.json"}
    (tmp_path / "chat_template.jinja").write_text("{{ other }}")
    assert open_checkpoint(tmp_path).chat_template == "{{ other }}"


def tokenizer_json(size: int) -> str:
    return json.dumps({"model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(size)}, "merges": []}})


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def replace_by_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: change_weights(f, lambda s: s.pop(DOWN)), rf"lacks 1 tensor\(s\) of a llama model: '{DOWN}'"),
        (lambda f: change_weights(f, lambda s: s.update({"model.layers.0.mlp.router": torch.ones(1)})),
         r"has 1 tensor\(s\) that no llama model of this config has: 'model\.layers\.0\.mlp\.router'"),
        (lambda f: change_weights(f, lambda s: s.update({NORM: torch.ones(7)})),
         rf"weight '{NORM}' is \[7\], the config expects \[48\]"),
        (lambda f: change_weights(f, lambda s: s.update({NORM: torch.ones(48, dtype=torch.int8)})),
         rf"weight '{NORM}' is int8, which is not a float type; quantised .*quantization_config"),
        (truncate, r"model\.safetensors: header of weight .*data_offsets .*the file is truncated; download or copy it"),
        (lambda f: (f / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1"),
         r"model\.safetensors: offset 0: .*it is not a safetensors file, or is truncated"),
        (replace_by_pickle, r"pytorch_model\.bin is a pickle: convert it to safetensors"),
        (lambda f: (f / "config.json").unlink(), r"there is no config\.json"),
        (lambda f: tiny.edit(f, num_hidden_layers=3), r"lacks 9 tensor\(s\) .*layers\.2\.input_layernorm"),
        (lambda f: tiny.edit(f, vocab_size=100),
         r"embed_tokens\.weight' is \[96, 48\], the config expects \[100, 48\]; one .* belongs to another model"),
        (lambda f: tiny.edit(f, tie_word_embeddings=False) and change_weights(f, lambda s: s.pop("lm_head.weight")),
         r"lacks 1 tensor\(s\) of a llama model: 'lm_head\.weight'"),
    ],
)  # fmt: skip
def test_damaged_directories(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    tiny.save(tiny.hf_model("llama"), tmp_path)
    open_checkpoint(tmp_path)
    damage(tmp_path)
    with pytest.raises(WeightError, match=message):
        open_checkpoint(tmp_path)


def test_config_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read as JSON"):
        open_checkpoint(tmp_path)


def test_truncated_and_missing_shards(tmp_path: Path) -> None:
    tiny.save(tiny.hf_model("llama"), tmp_path, "40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(WeightError, match=rf"{re.escape(shard.name)}: header of weight .* truncated"):
        open_checkpoint(tmp_path)
    shard.unlink()
    with pytest.raises(WeightError, match=rf"index\.json lists {re.escape(shard.name)}, which is not there"):
        open_checkpoint(tmp_path)


def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    tiny.save(tiny.hf_model("llama"), tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(97))
    with pytest.raises(WeightError, match="token ids up to 96, the model's embedding only 96 rows"):
        _ = open_checkpoint(tmp_path).tokenizer_json
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(WeightError, match=r"tokenizer\.json: expected an object, got a list"):
        _ = open_checkpoint(tmp_path).tokenizer_json


def test_other_paths(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="there is no such file"):
        open_checkpoint(tmp_path / "none")
    (tmp_path / "x.bin").write_text("")
    with pytest.raises(WeightError, match=r"nor a \.gguf file"):
        open_checkpoint(tmp_path / "x.bin")


def test_checkpoints_need_no_torch() -> None:
    code = "import sys, npu_compiler.frontend.llm, npusim.models.llm_weights; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "transformers", "tokenizers", "gguf"} & set(loaded)


# ---------------------------------------------------------------------------------------------------------------- GGUF


@pytest.mark.parametrize("name", [*tiny.ARCHITECTURES, "llama-bias", "linear", "qwen2-yarn", "phi3-partial"])
def test_gguf_is_the_model(name: str, tmp_path: Path) -> None:
    ours, theirs = tiny.decoder(name, 8)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", theirs, tiny.ARCHITECTURES[ours.config.model_type]))
    config = checkpoint.config
    expected = tiny.our_names(theirs.state_dict(), config)
    assert config.dtype == "float32"
    # what the format has no field for, or llama.cpp derives from the size of the model
    unsaid = {
        "qwen3": ("rope", "window_rope"),
        "gemma2": ("attention_scale",),
        "gemma3_text": ("windows", "attention_scale"),
        "cohere2": ("windows",),
        "smollm3": ("nope_layers",),
    }.get(name, ())
    assert dataclasses.replace(config, **{f: getattr(ours.config, f) for f in unsaid}) == ours.config
    assert set(checkpoint.weights) == set(expected)
    for key, array in checkpoint.weights.items():
        np.testing.assert_allclose(array, expected[key].numpy(), rtol=0, atol=1e-6, err_msg=key)


def test_gguf_fields(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    path = write_gguf(tmp_path / "tiny.gguf", tiny.hf_model("qwen2"), "qwen2", half=True)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.dtype == "float16"
    assert checkpoint.weights["model.norm.weight"].dtype == np.float16
    assert checkpoint.eos_ids == (28,)
    assert checkpoint.special_tokens == {"eos_token": "<|end|>"}
    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.tokenizer_json)
    assert tokenizer.encode("cab ab<|end|>").tokens == ["c", "ab", "Ġ", "ab", "<|end|>"]
    data = path.read_bytes()
    for size, message in [(3, "offset 0: the file ends"), (200, "ends within its header"), (-200, "truncated: ")]:
        path.write_bytes(data[:size])
        with pytest.raises(WeightError, match=message):
            open_checkpoint(path)
    path.write_bytes(b"GGML" + data[4:])
    with pytest.raises(WeightError, match="not a GGUF file"):
        open_checkpoint(path)
    path.write_bytes(data.replace(b"qwen2", b"qwenX"))
    with pytest.raises(ConfigError, match=r"general\.architecture = 'qwenX' is not supported"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("names", "pieces"),
    [
        (("gpt-2", "olmo", "mpt"), ["a", "Ġ12345"]),
        (("smollm", "starcoder", "refact", "command-r"), ["a", "Ġ", "1", "2", "3", "4", "5"]),
        (("llama-bpe", "dbrx"), ["a", "Ġ", "123", "45"]),
        (("qwen2", "stablelm2"), ["a", "Ġ", "1", "2", "3", "4", "5"]),
    ],
)
def test_names_of_splitting_rules(names: tuple[str, ...], pieces: list[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    letters = ["a", "Ġ", *"12345"]
    for name in names:
        made = tokenizers.Tokenizer.from_str(byte_level_bpe(letters, [], [1] * len(letters), name, None))
        assert [text for text, _ in made.pre_tokenizer.pre_tokenize_str("a 12345")] == pieces, name
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.pre = 'other' is not supported; known: default, gpt-2"):
        byte_level_bpe(letters, [], [1] * len(letters), "other", None)


# -------------------------------------------------------------------------------------------------------- real weights


def fetched(function: Callable[[], Path], dtype: str) -> Checkpoint:
    try:
        return open_checkpoint(function(), dtype)
    except RegistryUnavailable as e:
        pytest.skip(str(e))


def greedy(checkpoint: Checkpoint, ids: list[int], count: int) -> list[int]:
    model = load_decoder(checkpoint, len(ids) + count)
    out: list[int] = []
    with torch.no_grad():
        logits = model(torch.tensor([ids]), torch.arange(len(ids)), torch.tensor([len(ids) - 1]))
        for at in range(len(ids), len(ids) + count):
            out.append(int(logits.argmax()))
            logits = model(torch.tensor([out[-1:]]), torch.tensor([at]), torch.tensor([0]))
    return out


@pytest.mark.network
def test_smollm2_answers() -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    checkpoint = fetched(llm_weights.smollm2_135m, "float32")
    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.tokenizer_json)
    ids = tokenizer.encode("The capital of France is").ids
    assert ids == [504, 3575, 282, 4649, 314]
    answer = [7042, 30, 198, 198, 504, 2988]
    assert greedy(checkpoint, ids, len(answer)) == answer
    assert tokenizer.decode(answer) == " Paris.\n\nThe answer"
    assert checkpoint.eos_ids == (tokenizer.token_to_id("<|im_end|>"),)
    assert "<|im_start|>" in (checkpoint.chat_template or "")
    assert tokenizer.encode("<|im_start|>Hi 12").tokens == ["<|im_start|>", "Hi", "Ġ", "1", "2"]


@pytest.mark.network
def test_tinystories_tells_its_story() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    checkpoint = fetched(llm_weights.tinystories_15m, "float32")
    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.tokenizer_json)
    story = greedy(checkpoint, [1], 40)
    assert "".join(tokenizer.id_to_token(i) for i in story).replace("▁", " ") == (
        " Once upon a time, there was a little girl named Lily. She loved to play outside in the sunshine. "
        "One day, she saw a big, red ball in the sky. It"
    )
    text = "Once upon a time, Łukasz said: \n 🦙!"
    assert tokenizer.encode(text).ids[:5] == [1, *story[:4]]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
