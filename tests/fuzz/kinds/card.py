"""The description of a language model beside a compiled program: its bytes and its fields."""

from __future__ import annotations

import json
import random
from pathlib import Path

from npu_runtime.llm.manifest import ModelCard

from ..mutations import mutate_bytes, mutate_tree

_CARD = ModelCard(
    "name", 128, 4096, "identity", '{"model": {}}', "{{ messages }}", {"bos_token": "<s>"}, 1, (2, 3), {"top_k": 20}
)


def case(rng: random.Random, folder: Path) -> None:
    text = _CARD.to_json()
    if rng.random() < 0.2:
        data = mutate_bytes(rng, text.encode())
    else:
        tree = json.loads(text)
        for _ in range(rng.choice((1, 1, 2, 4))):
            mutate_tree(rng, tree, (1, 2, "x", [1, 2], {"bos_token": "x"}))
        data = json.dumps(tree).encode()
    card = ModelCard.from_json(data, "card")
    assert ModelCard.from_json(card.to_json(), "again").to_json() == card.to_json()
