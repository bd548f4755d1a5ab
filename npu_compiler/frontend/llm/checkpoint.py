"""Opens checkpoints of decoders: directories in the layout of Hugging Face, and GGUF files. It does not need torch."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...support import dtypes
from ...support.errors import ConfigError, NPUError, WeightError
from ...support.records import Field, parse_json
from ...weights.files import Spec, TensorFiles, WeightSource, open_weights, read_document
from ...weights.format import BlockFormat
from ...weights.quantized import QuantizedFiles, open_quantized
from .config import ORDER, LLMConfig, parameter_shapes
from .family import by_architecture, by_model_type
from .gguf_file import GGUFFile, hf_config
from .keys import MAX_SIZE, Keys, unsupported
from .tensor_map import Stored, TensorMap
from .vocabulary import byte_level_bpe, sentencepiece_bpe

__all__ = ["Checkpoint", "CheckpointWeights", "open_checkpoint"]

_log = logging.getLogger(__name__)
_LISTED = 4  # tensors named in one message


class CheckpointWeights(WeightSource, Mapping[str, np.ndarray]):
    """The weights that ``parameter_shapes`` lists, in the config's dtype. Each is read at its first use; it shares the
    mapped file's memory unless it has to be converted."""

    def __init__(self, config: LLMConfig, files: WeightSource, places: Mapping[str, Stored]):
        self.origin = files.origin
        self._dtype, self._files, self._places = config.dtype, files, places
        self._shapes = parameter_shapes(config)

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def spec(self, name: str) -> Spec:
        return self._shapes[name], "int64" if _is_order(name) else self._dtype

    def read(self, name: str) -> np.ndarray:
        place = self._places[name]
        if _is_order(name):  # of columns: whatever place the rows of the weight have
            return self._files.read(place.name)
        array = place.take(self._files.read(place.name))
        return array.astype(dtypes.numpy_dtype(self._dtype), copy=False)

    def block_format(self, name: str) -> BlockFormat | None:
        """Return the weight format of a matrix, if it consists of rows of a tensor that the files hold in blocks."""
        place = self._places[name]
        return None if place.transposed or place.shift else self._files.block_format(place.name)

    def blocks(self, name: str, format: BlockFormat) -> np.ndarray | None:
        place = self._places[name]
        stored = None if place.transposed or place.shift else self._files.blocks(place.name, format)
        return None if stored is None else place.take(stored)

    @property
    def activations(self) -> str | None:
        return self._files.activations

    @property
    def block_formats(self) -> dict[str, str]:
        """Return the weight formats of the matrices that the files store in blocks, by name."""
        matrices = [n for n, shape in self._shapes.items() if len(shape) == 2]
        held = {n: format.name for n in matrices if (format := self.block_format(n)) is not None}
        if isinstance(self._files, QuantizedFiles) and (rest := self._files.without_format()):
            what = f"{len(rest)} quantised matrices, {rest[0]!r} and the like,"
            _log.warning("%s: %s are stored as elements: no weight format holds their numbers", self.origin, what)
        return held

    def bytes_by_format(self) -> dict[str, int]:
        """Return the bytes of the weights in each weight format, and in each dtype of those in no format; largest
        first."""
        found: Counter[str] = Counter()
        for name, shape in self._shapes.items():
            format = self.block_format(name) if len(shape) == 2 else None
            row_bytes = None if format is None else format.row_bytes(shape[1])
            if format is not None and row_bytes is not None:
                found[format.name] += shape[0] * row_bytes
            else:
                dtype = self._files.spec(self._places[name].name)[1]
                found[dtype] += math.prod(shape) * dtypes.DTYPES[dtype].size
        return dict(found.most_common())

    def __getitem__(self, name: str) -> np.ndarray:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


@dataclass(frozen=True)
class Checkpoint:
    """A model's files: config, weights, tokenizer and settings.

    Attributes:
        path: the directory or file.
        config: the decoder's config, with the dtype to compute in.
        weights: by the names of ``parameter_shapes``; a source for the runtime's weight loader.
        chat_template: a Jinja template, or None.
        bos_id: the token that begins a text, or None.
        eos_ids: the tokens that end an answer.
        special_tokens: 'bos_token' and the like -> text, for the chat template.
        generation: the authors' settings under the names of ``generation_config.json`` (temperature, top_k, …).
        files: all files of the checkpoint.
    """

    path: Path
    config: LLMConfig
    weights: CheckpointWeights
    chat_template: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    generation: Mapping[str, Any]
    files: tuple[Path, ...]
    _read_tokenizer: Callable[[], str | None] = dataclasses.field(repr=False)

    @cached_property
    def tokenizer_json(self) -> str | None:
        """The text of a ``tokenizer.json`` (of the ``tokenizers`` package), which is rebuilt from a GGUF file's
        vocabulary; None if there is no tokenizer.

        Raises:
            WeightError: it has tokens beyond the model's vocabulary.
        """
        text = self._read_tokenizer()
        if text is not None:
            self._check_vocabulary(text)
        return text

    def _check_vocabulary(self, text: str) -> None:
        where = f"{self.path}: tokenizer.json"
        document = Field(parse_json(text, where, WeightError), where, WeightError)
        vocabulary, added = document.get("model").get("vocab"), document.get("added_tokens")
        if isinstance(vocabulary.value, list):  # pieces with scores, by position
            top = len(vocabulary.value) - 1
        else:
            ids = {} if vocabulary.value is None else vocabulary.mapping()
            top = max((i.integer(0, MAX_SIZE) for i in ids.values()), default=-1)
        for token in [] if added.value is None else added.items():
            top = max(top, token.get("id").integer(0, MAX_SIZE))
        if top >= self.config.vocab_size:
            raise WeightError(
                f"{self.path}: the tokenizer has token ids up to {top}, the model's embedding only "
                f"{self.config.vocab_size} rows: the tokenizer belongs to another model"
            )


def open_checkpoint(path: str | os.PathLike[str], dtype: Any = None) -> Checkpoint:
    """Read a model's config and check that it has all its weights. Weights and tokenizer are read at their use.

    Args:
        path: a directory with ``config.json`` and ``*.safetensors`` (sharded or not, quantised or not), or a ``.gguf``
            file.
        dtype: to compute in: 'bfloat16', 'float16' or 'float32'; None: the config's, else the one that the weights are
            stored in (bfloat16 for quantised ones).

    Raises:
        ConfigError: a setting is malformed or not supported; the message names its key.
        WeightError: files or tensors are missing, truncated, of another shape, or not part of such a model.
    """
    path = Path(path)
    dtype = None if dtype is None else dtypes.storage_dtype(dtype)
    if path.is_dir():
        return _open_directory(path, dtype)
    if not path.is_file():
        raise WeightError(f"{path}: there is no such file or directory")
    if path.suffix == ".gguf":
        return _open_gguf(path, dtype)
    raise WeightError(f"{path}: neither a model directory with a config.json nor a .gguf file")


def _check(
    path: Path, config: LLMConfig, files: WeightSource, places: Mapping[str, Stored], ignored: re.Pattern[str]
) -> None:
    """Check by the files' headers that all weights are there and have the right shape, and that no tensor is
    unknown."""
    shapes, there = parameter_shapes(config), set(files.names())
    missing = sorted({place.name for place in places.values()} - there)
    if missing:
        near = difflib.get_close_matches(missing[0], sorted(there), 1)
        hint = f"; the nearest it has is {near[0]!r}" if near else ""
        what = f"{len(missing)} tensor(s) of a {config.model_type} model"
        raise WeightError(f"{path} lacks {what}: {_listed(missing)}{hint}")
    heights: dict[str, int] = {}  # of tensors that several weights are part of
    for place in places.values():
        heights[place.name] = max(heights.get(place.name, 0), place.rows[1] * place.runs if place.rows else 0)
    for name, place in places.items():
        shape, stored = files.spec(place.name)
        expected = (heights[place.name] or shapes[name][0], *shapes[name][1:])
        expected = expected[::-1] if place.transposed else expected
        if shape != expected:
            fits = f"is {list(shape)}, the config expects {list(expected)}"
            raise WeightError(f"{path}: weight {place.name!r} {fits}; one of the two belongs to another model")
        if not dtypes.is_float(stored) and not _is_order(name):
            known = "quantised matrices need a quantization_config in config.json"
            raise WeightError(f"{path}: weight {place.name!r} is {stored}, which is not a float type; {known}")
    extra = sorted(n for n in there - {place.name for place in places.values()} if not ignored.search(n))
    if isinstance(files, QuantizedFiles):
        extra = [n for n in extra if not files.is_padding(n)]
    if extra:
        what = f"{len(extra)} tensor(s) that no {config.model_type} model of this config has"
        raise WeightError(f"{path} has {what}: {_listed(extra)}; without them it would be another model")


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:_LISTED])) + (" …" if len(names) > _LISTED else "")


# -------------------------------------------------------------------------------------------- Hugging Face's directory


def _open_directory(path: Path, dtype: str | None) -> Checkpoint:
    raw = _json(path / "config.json")
    if raw is None:
        raise WeightError(f"{path}: there is no config.json in this directory")
    raw, quantization = _split_quantization(raw)
    config = LLMConfig.from_hf(raw)
    try:
        files = open_weights(path)
    except WeightError as e:
        other = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pth", ".pt"))
        hint = f"; {other[0]} is a pickle: convert it to safetensors" if other and "no .safetensors" in str(e) else ""
        raise WeightError(f"{e}{hint}") from None
    if quantization is not None:
        assert isinstance(files, TensorFiles)
        files = open_quantized(files, *quantization)
    family = by_model_type(config.model_type)
    tensors = _prefixed(family.tensors, set(files.names()))
    places = tensors.places(parameter_shapes(config), config.num_heads, config.num_kv_heads)
    if isinstance(files, QuantizedFiles):
        config = dataclasses.replace(config, column_orders=_use_column_orders(files, places))
        places = tensors.places(parameter_shapes(config), config.num_heads, config.num_kv_heads)
    head = re.escape(tensors.name("lm_head"))  # a tied one may be stored, too
    unused = [r"rotary_emb\.inv_freq$", rf"(^|\.){head}\.weight$", family.unused]
    _check(path, config, files, places, re.compile("|".join(filter(None, unused))))
    text = Keys(raw).child(family.wrappers.get(raw["model_type"], "text_config")).values
    if dtype is None and not any(k.get(d) for k in (raw, text) for d in ("dtype", "torch_dtype")):
        stored = files.spec(places["model.embed_tokens.weight"].name)[1]
        dtype = stored if stored in dtypes.STORAGE_DTYPES else None
    config = dataclasses.replace(config, dtype=dtype or config.dtype)
    settings = _json(path / "tokenizer_config.json") or {}
    generation = _plain_settings(_json(path / "generation_config.json") or {})
    ids = {**text, **raw, **generation}
    sources = (*path.glob("*.json"), *path.glob("*.safetensors"), *path.glob("chat_template.jinja"))
    return Checkpoint(
        path=path,
        config=config,
        weights=CheckpointWeights(config, files, places),
        chat_template=_chat_template(path, settings),
        bos_id=next(iter(_ids(ids, "bos_token_id")), None),
        eos_ids=_ids(ids, "eos_token_id"),
        special_tokens=_special_tokens(settings),
        generation=generation,
        files=tuple(sorted(sources)),
        _read_tokenizer=lambda: _text(path / "tokenizer.json"),
    )


# Projections of the same input, whose columns a quantiser orders alike.
_SIBLINGS = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


def _use_column_orders(files: QuantizedFiles, places: Mapping[str, Stored]) -> tuple[tuple[str, str], ...]:
    """Order the columns of quantised matrices so that their groups are runs. Returns ``LLMConfig.column_orders``."""
    owners: dict[str, str] = {}
    columns: dict[str, np.ndarray] = {}
    for name, place in places.items():
        order = files.permutation(place.name) if place.rows is None and not place.transposed else None
        if order is None:
            continue
        module = name.removesuffix(".weight")
        parent, _, leaf = module.rpartition(".")
        sibling = f"{parent}.{_SIBLINGS.get(leaf, leaf)}"
        shares = sibling in columns and np.array_equal(columns[sibling], order)
        owners[module], columns[module] = sibling if shares else module, order
        files.permute(place.name, "" if shares else f"{place.name.removesuffix('weight')}{ORDER}")
    return tuple(owners.items())


def _is_order(name: str) -> bool:
    return name.endswith(f".{ORDER}")


_QUANTIZATION = ("quantization_config", "compression_config")  # the second in files of early llm-compressor


def _split_quantization(raw: dict[str, Any]) -> tuple[dict[str, Any], tuple[Any, str] | None]:
    """Return a ``config.json`` without its quantization_config, and that setting with its path. Multimodal models have
    it in the config of the text model."""
    nested = {name: child for name, child in raw.items() if isinstance(child, dict)}
    places = [("", raw), *((f"{name}.", child) for name, child in nested.items())]
    found = [(values[key], at + key) for at, values in places for key in _QUANTIZATION if values.get(key)]

    def plain(values: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in values.items() if k not in _QUANTIZATION}

    return plain(raw) | {k: plain(v) for k, v in nested.items() if k not in _QUANTIZATION}, next(iter(found), None)


def _json(path: Path) -> dict[str, Any] | None:
    data = _bytes(path, ConfigError)
    if data is None:
        return None
    document = parse_json(data, str(path), ConfigError)
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return document


def _bytes(path: Path, error: type[NPUError]) -> bytes | None:
    """A file's contents; None if it does not exist."""
    try:
        return read_document(path)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise error(f"{path} cannot be read: {e.strerror or e}") from None


def _text(path: Path) -> str | None:
    data = _bytes(path, WeightError)
    try:
        return None if data is None else data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise WeightError(f"{path} is not UTF-8: {e}") from None


def _plain_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are scalars or lists of scalars; options of generation are not objects."""
    scalar = str | int | float | None
    listed = {k: v if isinstance(v, list) else [v] for k, v in values.items()}
    return {k: values[k] for k, v in listed.items() if all(isinstance(x, scalar) for x in v)}


def _prefixed(tensors: TensorMap, names: set[str]) -> TensorMap:
    """With the prefixes that this file has: some lack the family's, multimodal models have one more."""
    base, embedding = tensors.prefix, f"{tensors.name('embed_tokens')}.weight"
    for prefix in (base, f"language_model.{base}", f"{base}language_model.", ""):
        if f"{prefix}{embedding}" in names:
            nested = prefix.startswith("language_model.") and f"{tensors.name('lm_head')}.weight" not in names
            return dataclasses.replace(tensors, prefix=prefix, head_prefix="language_model." if nested else "")
    return tensors


def _ids(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The token ids of a key: one, a list or none. Some files write -1 for none."""
    f = Field(values.get(key), key, ConfigError)
    listed = f.items() if isinstance(f.value, list) else [] if f.value is None else [f]
    return tuple(i for i in (x.integer(-1, MAX_SIZE) for x in listed) if i >= 0)


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    own = _text(path / "chat_template.jinja")
    if own is not None:
        return own
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = (t for t in template if isinstance(t, dict) and t.get("name") == "default")
        template = next((t.get("template") for t in named), None)
    return template if isinstance(template, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in settings.items() if k.endswith("_token")}
    return {k: v for k, v in tokens.items() if isinstance(v, str)}


# ---------------------------------------------------------------------------------------------------------------- GGUF

_UNUSED_GGUF = re.compile(r"^rope_(freqs|factors_(short|long))\.weight$")


def _open_gguf(path: Path, dtype: str | None) -> Checkpoint:
    file = GGUFFile(path)
    metadata = file.metadata
    config = LLMConfig.from_hf(hf_config(file))
    config = dataclasses.replace(config, dtype=dtype or config.dtype)
    _, gguf = by_architecture(Keys(metadata).text("general.architecture"))
    places = gguf.tensors.places(parameter_shapes(config), config.num_heads, config.num_kv_heads)
    _check(path, config, file, places, _UNUSED_GGUF)
    meta = Keys(metadata)
    tokens = meta.texts("tokenizer.ggml.tokens") if meta.has("tokenizer.ggml.tokens") else ()
    if len(tokens) > config.vocab_size:
        raise WeightError(
            f"{path}: tokenizer.ggml.tokens has {len(tokens)} tokens, "
            f"the model's embedding only {config.vocab_size} rows: the tokenizer belongs to another model"
        )
    keys = {k: f"tokenizer.ggml.{k}_token_id" for k in ("bos", "eos", "eot", "padding", "unknown")}
    at = {k: meta.integer(key, low=0) if meta.has(key) else None for k, key in keys.items()}
    texts = {"bos_token": at["bos"], "eos_token": at["eos"], "pad_token": at["padding"], "unk_token": at["unknown"]}
    return Checkpoint(
        path=path,
        config=config,
        weights=CheckpointWeights(config, file, places),
        chat_template=meta.text("tokenizer.chat_template") if meta.has("tokenizer.chat_template") else None,
        bos_id=at["bos"],
        eos_ids=tuple(dict.fromkeys(i for i in (at["eos"], at["eot"]) if i is not None)),
        special_tokens={k: tokens[i] for k, i in texts.items() if i is not None and i < len(tokens)},
        generation={},
        files=(path,),
        _read_tokenizer=lambda: _gguf_tokenizer(meta),
    )


def _gguf_tokenizer(meta: Keys) -> str | None:
    def at(key: str) -> str:
        return f"tokenizer.ggml.{key}"

    if not meta.has(at("tokens")):
        return None
    tokens, kind = meta.texts(at("tokens")), meta.text(at("model"))
    types = meta.field(at("token_type"), [1] * len(tokens)).integers()
    byte_level = kind == "gpt2"
    bos = None
    if meta.flag(at("add_bos_token"), not byte_level) and meta.has(at("bos_token_id")):
        bos = meta.integer(at("bos_token_id"), low=0, high=len(tokens) - 1)
    if byte_level:
        merges = meta.field(at("merges"), []).texts()
        return byte_level_bpe(tokens, merges, types, meta.text(at("pre"), "default"), bos)
    if kind == "llama":
        scores = meta.field(at("scores"), [0.0] * len(tokens))
        ranks = [f.number() for f in scores.row(len(tokens))]
        return sentencepiece_bpe(tokens, ranks, types, bos, meta.flag(at("add_space_prefix"), True))
    raise unsupported(at("model"), kind, "known: gpt2, llama")
