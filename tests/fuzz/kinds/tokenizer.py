"""tokenizer.json of every model of the ``tokenizers`` package: loading, encoding and decoding."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from .. import model_files
from ..mutations import mutate_bytes, mutate_tree

_NESTED = 100_000


@cache
def _parts() -> list[Any]:
    """Parts of all tokenizers, to be put into others."""
    documents = [json.loads(model_files.tokenizer(kind)) for kind in model_files.TOKENIZERS]
    regexes = [{"Regex": text} for text in ("(a+)+$", "(a|aa)+$", "((a{1,100}){1,100}){1,100}", "(", "\\p{Foo}", "")]
    return [part for document in documents for part in document.values()] + regexes


def case(rng: random.Random, folder: Path) -> None:
    text = model_files.tokenizer(rng.choice(model_files.TOKENIZERS))
    draw = rng.random()
    if draw < 0.005:
        text = rng.choice(("[", '{"model":')) * _NESTED
    elif draw < 0.2:
        text = mutate_bytes(rng, text.encode()).decode("utf-8", errors="replace")
    else:
        tree = json.loads(text)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            mutate_tree(rng, tree, _parts())
        text = json.dumps(tree)
    model_files.use_tokenizer(text)
