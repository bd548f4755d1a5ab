"""What a language model is besides its tensors, as plain data that can be kept beside a compiled program."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from npu_compiler.errors import ArtifactError

_VERSION = 1


@dataclass(frozen=True)
class ModelCard:
    """Attributes:
    name: for messages and reports.
    max_len: positions of the program's caches.
    limit: positions the model was made for; 0: unknown.
    identity: a text that differs between architectures; together with the weights it tells models apart.
    tokenizer: the text of a tokenizer.json, or None.
    chat_template: a Jinja template, or None.
    special_tokens: what the template may ask for: 'bos_token' and the like.
    bos_id: the token an empty prompt stands for.
    eos_ids: tokens that end an answer.
    defaults: sampling options that the model's makers recommend.
    """

    name: str
    max_len: int
    limit: int = 0
    identity: str = ""
    tokenizer: str | None = None
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"version": _VERSION, **dataclasses.asdict(self)}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, origin: str) -> ModelCard:
        """Inverse of :meth:`to_json`; raises ``ArtifactError`` that names ``origin``."""
        try:
            fields = json.loads(text)
            version = fields.pop("version")
            card = cls(**{**fields, "eos_ids": tuple(fields.get("eos_ids", ()))})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ArtifactError(f"{origin}: not the description of a language model: {error}") from None
        texts = (card.name, card.identity, card.tokenizer or "", card.chat_template or "")
        numbers = (card.max_len, card.limit, card.bos_id or 0, *card.eos_ids)
        maps = (card.special_tokens, card.defaults)
        kinds = [(texts, str), (numbers, int), (maps, Mapping)]
        if version != _VERSION or any(not isinstance(v, kind) for values, kind in kinds for v in values):
            raise ArtifactError(f"{origin}: not a description of a language model that this version reads")
        return card
