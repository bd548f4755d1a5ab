"""The description of a language model beside a compiled program: its bytes and its fields."""

from __future__ import annotations

import json
import random
from pathlib import Path

from npu_runtime.llm.manifest import ModelManifest

from ..mutations import mutate_bytes, mutate_tree

_MANIFEST = ModelManifest(
    "name", 128, 4096, "identity", '{"model": {}}', "{{ messages }}", {"bos_token": "<s>"}, 1, (2, 3), {"top_k": 20}
)


def case(rng: random.Random, folder: Path) -> None:
    text = _MANIFEST.to_json()
    if rng.random() < 0.2:
        data = mutate_bytes(rng, text.encode())
    else:
        tree = json.loads(text)
        for _ in range(rng.choice((1, 1, 2, 4))):
            mutate_tree(rng, tree, (1, 2, "x", [1, 2], {"bos_token": "x"}))
        data = json.dumps(tree).encode()
    manifest = ModelManifest.from_json(data, "manifest")
    assert ModelManifest.from_json(manifest.to_json(), "again").to_json() == manifest.to_json()
