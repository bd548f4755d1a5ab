"""The manifest of a language model: everything except its tensors, as JSON beside the compiled program."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from npu_compiler.support.errors import ArtifactError, InputError
from npu_compiler.support.records import Field, parse_json

from .tokenizer import Tokenizer

_VERSION = 1
_MAX_COUNT, _MAX_TEXT = 2**31 - 1, 2**31


@dataclass(frozen=True)
class ModelManifest:
    """The properties of a model that the runtime needs besides program and weights.

    Attributes:
        name: the name in messages and reports.
        max_len: positions of the program's KV caches.
        limit: positions the model was trained for; 0: unknown.
        identity: a text that differs between architectures; together with the weights it identifies a model.
        tokenizer: the text of a tokenizer.json, or None.
        chat_template: a Jinja template, or None.
        special_tokens: variables of the template: 'bos_token' and the like.
        bos_id: the token that stands for an empty prompt, or None.
        eos_ids: the tokens that end an answer.
        defaults: sampling options that the model's authors recommend, under the names of generation_config.json.
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
        """Return the manifest as a JSON document, with the version of its format."""
        return json.dumps({"version": _VERSION, **dataclasses.asdict(self)})

    def open_tokenizer(self, vocab: int) -> Tokenizer:
        """Return the tokenizer. Raises ``InputError`` if there is none, or one of more than ``vocab`` tokens."""
        if self.tokenizer is None:
            raise InputError(f"{self.name} has no tokenizer.json; pass token ids instead of text")
        tokenizer = Tokenizer(self.tokenizer)
        if tokenizer.size > vocab:
            raise InputError(
                f"the tokenizer of {self.name} has {tokenizer.size} tokens, but the model has only {vocab}: the "
                "tokenizer belongs to another model"
            )
        return tokenizer

    @classmethod
    def from_json(cls, text: str | bytes, origin: str) -> ModelManifest:
        """Return the manifest of a document that :meth:`to_json` made.

        Raises:
            ArtifactError: the text is damaged or of another version; the message begins with ``origin``.
        """
        f = Field(parse_json(text, origin, ArtifactError), origin)
        if not isinstance(f.value, dict) or f.value.get("version") != _VERSION:
            raise ArtifactError(f"{origin}: not a description of a language model that this version reads")
        r = f.record(["version", *(x.name for x in dataclasses.fields(cls))])
        return cls(
            name=r["name"].text(),
            max_len=r["max_len"].integer(0, _MAX_COUNT),
            limit=r["limit"].integer(0, _MAX_COUNT),
            identity=r["identity"].text(_MAX_TEXT),
            tokenizer=r["tokenizer"].optional(lambda x: x.text(_MAX_TEXT)),
            chat_template=r["chat_template"].optional(lambda x: x.text(_MAX_TEXT)),
            special_tokens={k: v.text() for k, v in r["special_tokens"].mapping().items()},
            bos_id=r["bos_id"].optional(lambda x: x.integer(0, _MAX_COUNT)),
            eos_ids=r["eos_ids"].integers(0, _MAX_COUNT),
            defaults={k: v.value for k, v in r["defaults"].mapping().items()},
        )
