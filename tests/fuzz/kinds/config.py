"""Model directories: config.json of every family and the other documents changed; files cut, missing, or no files."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

from npu_compiler.frontend.llm import open_checkpoint

from .. import model_files
from ..mutations import mutate_bytes, mutate_tree

_VALUES = (
    *("llama", "qwen2", "gemma3", "phi3", "gpt2", "cohere", "yarn", "llama3", "longrope", "linear", "silu"),
    *("bfloat16", "auto"),
    *("full_attention", "sliding_attention", ["full_attention"], {"rope_type": "yarn", "factor": 4.0}, [1.0, 2.0]),
    *(True, False, 2**31, 10**30, 1e308, 4096),
)  # fmt: skip
_DOCUMENTS = ("config.json", "config.json", "config.json", "generation_config.json", "tokenizer_config.json",
              "tokenizer.json")  # fmt: skip


def case(rng: random.Random, folder: Path) -> None:
    documents: dict[str, Any] = dict(model_files.directory(rng.choice(list(model_files.FAMILIES))))
    files = {name: d if isinstance(d, bytes) else json.dumps(d).encode() for name, d in documents.items()}
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        name = rng.choice(_DOCUMENTS)
        if rng.random() < 0.8:
            documents[name] = tree = copy.deepcopy(documents[name])
            mutate_tree(rng, tree, _VALUES)
            files[name] = json.dumps(tree).encode()
        else:
            files[name] = mutate_bytes(rng, files[name])
    if rng.random() < 0.2:
        files["chat_template.jinja"] = mutate_bytes(rng, "{{ messages }} é".encode())
    if rng.random() < 0.05:
        files["model.safetensors"] = mutate_bytes(rng, files["model.safetensors"])
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if rng.random() < 0.1:
        _replace(rng, folder / rng.choice(list(files)))
    model_files.use_checkpoint(open_checkpoint(folder, rng.choice((None, "bfloat16"))))


def _replace(rng: random.Random, path: Path) -> None:
    """Something else under the name of a file."""
    path.unlink()
    match rng.randrange(5):
        case 0:
            path.mkdir()
        case 1:
            os.mkfifo(path)
        case 2:
            path.symlink_to("nowhere")
        case 3:
            path.symlink_to(path.name)
        case _:
            path.write_bytes(b"")
