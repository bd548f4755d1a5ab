"""Small models of every family as files, made in this process without PyTorch: what the kinds of model files damage."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from npu_compiler.frontend.llm.checkpoint import Checkpoint
from npu_compiler.frontend.llm.config import LLMConfig, parameter_shapes
from npu_compiler.frontend.llm.family import by_architecture, by_model_type
from npu_compiler.frontend.llm.tensor_map import TensorMap
from npu_compiler.weights.format import block_format
from npu_runtime.llm.loader import make_manifest
from npu_runtime.llm.manifest import ModelManifest
from npu_runtime.llm.tokenizer import Detokenizer
from npu_runtime.llm.tokenizer import Tokenizer as Ours

# GGUF's architecture -> model type; each reads its files in a way that the others do not
FAMILIES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text", "phi3": "phi3", "gpt2": "gpt2",
    "gptneox": "gpt_neox", "stablelm": "stablelm", "smollm3": "smollm3", "cohere2": "cohere2", "granite": "granite",
}  # fmt: skip
_LAYER_NORMS = ("gpt2", "gptneox", "stablelm", "cohere2")
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab", "<|end|>", "▁", "<unk>", "<0x41>"]
TEXT = f"cab ab<|end|> Ab é\U0001f600 {'a' * 40}c"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 32, 4, 2, 8, 64


def config(family: str) -> dict[str, Any]:
    """A config.json of one layer."""
    own: dict[str, dict[str, Any]] = {
        "llama": {"rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }, "attention_bias": False, "mlp_bias": False},
        "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0,
                  "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}},
        "qwen3": {"layer_types": ["full_attention"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        "gemma3": {"query_pre_attn_scalar": 8, "sliding_window": 8, "layer_types": ["sliding_attention"],
                   "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh"},
        "phi3": {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 64, "rope_scaling": {
            "type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [2.0, 2.5]}},
        "gpt2": {"num_key_value_heads": HEADS, "scale_attn_weights": True, "hidden_act": "gelu_new"},
        "gptneox": {"num_key_value_heads": HEADS, "partial_rotary_factor": 0.5, "use_parallel_residual": True},
        "stablelm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True, "use_parallel_residual": False},
        "smollm3": {"no_rope_layers": [1], "no_rope_layer_interval": 4, "use_sliding_window": False},
        "cohere2": {"sliding_window": 8, "sliding_window_pattern": 4, "logit_scale": 0.5},
        "granite": {"embedding_scale": 2.0, "residual_scale": 0.5, "attention_scale": 0.25, "logit_scale": 4.0},
    }  # fmt: skip
    said = {
        "model_type": FAMILIES[family], "vocab_size": len(LETTERS), "hidden_size": HIDDEN, "intermediate_size": MLP,
        "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "dtype": "float32", "eos_token_id": [28], "bos_token_id": 28, **own[family],
    }  # fmt: skip
    aliases = by_model_type(FAMILIES[family]).aliases
    return {aliases.get(key, key): value for key, value in said.items()}


def _tensors(settings: dict[str, Any], tensors: TensorMap) -> dict[str, np.ndarray]:
    parsed = LLMConfig.from_hf(settings)
    shapes, found = parameter_shapes(parsed), dict[str, tuple[int, ...]]()
    for name, place in tensors.places(shapes, parsed.num_heads, parsed.num_kv_heads).items():
        rows = place.rows[1] * place.runs if place.rows else shapes[name][0]
        shape = (rows, *shapes[name][1:])
        found[place.name] = max(shape[::-1] if place.transposed else shape, found.get(place.name, ()))
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in found.items()}


@cache
def directory(family: str) -> dict[str, Any]:
    """The documents of a model directory by file name, and its tensors as 'model.safetensors' (bytes)."""
    settings = config(family)
    tensors = _tensors(settings, by_model_type(FAMILIES[family]).tensors)
    return {
        "config.json": settings,
        "generation_config.json": {"eos_token_id": [28], "temperature": 0.7, "top_k": 20, "do_sample": True},
        "tokenizer_config.json": {
            "chat_template": [{"name": "default", "template": "{{ messages }}"}, {"name": "tool", "template": "x"}],
            "bos_token": {"content": "<s>"}, "eos_token": "</s>",
        },
        "tokenizer.json": json.loads(tokenizer("byte-level")),
        "model.safetensors": safetensors.numpy.save(tensors),
    }  # fmt: skip


TOKENIZERS = ("byte-level", "metaspace", "wordpiece", "unigram", "wordlevel")


@cache
def tokenizer(kind: str) -> str:
    """A tokenizer.json of each model of the ``tokenizers`` package, with most of its other parts."""
    vocabulary = {token: i for i, token in enumerate(LETTERS)}
    pre, norm = pre_tokenizers, normalizers
    if kind == "byte-level":
        made = Tokenizer(models.BPE(vocabulary, [("a", "b")], ignore_merges=True))
        cut = pre.Split(Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
        made.pre_tokenizer = pre.Sequence([cut, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
        made.decoder, made.normalizer = decoders.ByteLevel(), norm.NFC()
    elif kind == "metaspace":
        made = Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        made.normalizer = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁"), norm.Lowercase(), norm.Strip()])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(parts)
    elif kind == "wordpiece":
        made = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", max_input_chars_per_word=20))
        made.normalizer, made.pre_tokenizer = norm.BertNormalizer(), pre.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
    elif kind == "unigram":
        made = Tokenizer(models.Unigram([(t, -float(i)) for i, t in enumerate(LETTERS)], 30, False))
        made.pre_tokenizer, made.decoder = pre.Metaspace(), decoders.Metaspace()
    else:
        made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        made.pre_tokenizer = pre.Sequence([pre.Whitespace(), pre.Digits(True), pre.Punctuation()])
    made.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<unk>", lstrip=True, rstrip=True)])
    made.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", pair="<|end|> $A $B", special_tokens=[("<|end|>", 28)]
    )
    made.enable_truncation(8)
    made.enable_padding(length=8)
    text: str = made.to_str()
    return text


@cache
def gguf_bytes(family: str, folder: Path, quantised: bool) -> bytes:
    """A GGUF file as its own package writes it."""
    settings = {**config(family), "attention_bias": family == "llama"}
    kv_heads = settings.get("num_key_value_heads", HEADS)
    tensors = _tensors(settings, by_architecture(family)[1].tensors)
    if family == "phi3":
        tensors |= {f"rope_factors_{x}.weight": np.array([1.0, 1.5], np.float32) for x in ("short", "long")}
    if family == "llama":
        tensors["rope_freqs.weight"] = np.array([1.0, 1.5, 2.0, 4.0], np.float32)
    path = folder / f"{family}.gguf"
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    if family in _LAYER_NORMS:
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(4 if family in ("phi3", "gptneox", "stablelm") else HEAD_DIM)
    if family == "qwen2":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(2.0)
        writer.add_rope_scaling_orig_ctx_len(64)
    if family in ("gemma3", "phi3", "cohere2"):
        writer.add_sliding_window(8)
    if family in ("cohere2", "granite"):
        writer.add_logit_scale(0.5)
    if family in ("gptneox", "stablelm"):
        writer.add_parallel_residual(family == "gptneox")
    sentencepiece = family in ("gemma3", "phi3")
    writer.add_tokenizer_model("llama" if sentencepiece else "gpt2")
    writer.add_tokenizer_pre("qwen2" if family == "qwen2" else "llama-bpe" if family == "llama" else "default")
    writer.add_token_list(LETTERS)
    writer.add_token_types([1] * 28 + [3, 1, 2, 6])
    writer.add_token_scores([-float(i) for i in range(len(LETTERS))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(28)
    writer.add_eos_token_id(28)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages }}")
    kinds = [gguf.GGMLQuantizationType[n] for n in ("Q8_0", "Q4_0", "Q4_1", "F16", "Q5_0", "Q5_1")]
    for i, (name, array) in enumerate(tensors.items()):
        if quantised and array.ndim == 2:
            kind = kinds[i % len(kinds)]
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def use_checkpoint(checkpoint: Checkpoint) -> None:
    """Everything that loading a model asks of its files, but compiling it."""
    for name in checkpoint.weights:
        array = checkpoint.weights[name]
        assert array.shape == checkpoint.weights.spec(name)[0]
    for name, held in checkpoint.weights.block_formats.items():
        format, (rows, columns) = block_format(held), checkpoint.weights.spec(name)[0]
        blocks = checkpoint.weights.blocks(name, format)
        assert blocks is not None and format.decode(blocks, columns).shape == (rows, columns)
    manifest = make_manifest(checkpoint)
    assert ModelManifest.from_json(manifest.to_json().encode(), "manifest") == manifest
    if manifest.tokenizer is not None:
        use_tokenizer(manifest.tokenizer)


def use_tokenizer(text: str) -> None:
    made = Ours(text)
    ids = made.encode(TEXT)
    made.encode("", special=False)
    made.decode([*ids, 0, made.size, 2**32 - 1])
    detokenizer = Detokenizer(made)
    for i in [*ids, 28, 0]:
        detokenizer.push(i)
    detokenizer.flush()
