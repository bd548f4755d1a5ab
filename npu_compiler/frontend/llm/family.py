"""``Family``: all that distinguishes one family of decoders. One file of ``families/`` declares each.

Shared code (config, checkpoint, modules) reads a family's fields and never its name. Files are discovered, so that a
new family is one new file; docs/families.md walks through one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from .keys import Keys, unsupported
from .tensor_map import GGUF_NAMES, TensorMap

__all__ = [
    "FAMILIES",
    "GGUF",
    "Family",
    "attention_bias",
    "by_architecture",
    "by_model_type",
    "gguf_names",
    "refused_settings",
    "register",
]


def _nothing(keys: Keys) -> Mapping[str, Any]:
    return {}


def attention_bias(keys: Keys) -> dict[str, Any]:
    """Read 'attention_bias': whether all four projections of attention have a bias."""
    bias = keys.flag("attention_bias", False)
    return {"qkv_bias": bias, "output_bias": bias}


def gguf_names(**other: str) -> TensorMap:
    """Return the map of a GGUF file's tensors; ``other``: the architecture's names of norms, by our names."""
    return TensorMap(names={**GGUF_NAMES, **other}, prefix="", layer="blk.{}.")


@dataclass(frozen=True)
class GGUF:
    """A family in GGUF files.

    Attributes:
        architecture: the value of 'general.architecture'.
        tensors: the places of the weights.
        present: our key of a setting -> a tensor; the setting is true if the file has the tensor.
        complete: takes the settings read so far, by our keys, and returns those that files of this architecture do not
            state.
    """

    architecture: str
    tensors: TensorMap = field(default_factory=gguf_names)
    present: Mapping[str, str] = field(default_factory=dict)
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}


@dataclass(frozen=True)
class Family:
    """A family of decoders.

    Attributes:
        model_type: the model type in config.json. It means what the class of that name in transformers computes.
        wrappers: model types of multimodal models -> the key of their config.json that has this family's config.
        aliases: our key of a setting -> the family's key, if config.json has another one.
        defaults: values of settings that config.json may leave out, by the family's keys.
        settings: our keys of settings that ``read`` understands and that would change the computation of other
            families: those refuse them.
        fixed: fields of ``LLMConfig`` that all models of the family have in common.
        read: returns the fields of ``LLMConfig`` that depend on the family's own settings; they take precedence over
            the shared reader's.
        tensors: the places of the weights in safetensors files.
        unused: a regular expression for tensors that a file may have and the computation does not need.
        gguf: None if GGUF has no architecture for the family.
    """

    model_type: str
    wrappers: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Keys], Mapping[str, Any]] = _nothing
    tensors: TensorMap = field(default_factory=TensorMap)
    unused: str = ""
    gguf: GGUF | None = None


FAMILIES: dict[str, Family] = {}  # by model type, wrappers included; complete after ``_discover``


def register(family: Family) -> Family:
    """Make a family known.

    Raises:
        ValueError: its model type or its GGUF architecture is taken.
    """
    for model_type in (family.model_type, *family.wrappers):
        if model_type in FAMILIES:
            raise ValueError(f"model type {model_type!r} is declared twice")
    other = [f.gguf.architecture for f in FAMILIES.values() if f.gguf is not None]
    if family.gguf is not None and family.gguf.architecture in other:
        raise ValueError(f"GGUF architecture {family.gguf.architecture!r} is declared twice")
    FAMILIES.update(dict.fromkeys((family.model_type, *family.wrappers), family))
    return family


@cache
def _discover() -> None:
    families = import_module(f"{__package__}.families")
    for module in iter_modules(families.__path__):
        import_module(f"{families.__name__}.{module.name}")


def by_model_type(name: str) -> Family:
    """Return the family of a config.json's model type.

    Raises:
        ConfigError: no family has it.
    """
    _discover()
    if name not in FAMILIES:
        raise unsupported("model_type", name, f"known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def by_architecture(name: str) -> tuple[Family, GGUF]:
    """Return the family of a GGUF file's 'general.architecture', and how GGUF files describe it.

    Raises:
        ConfigError: no family has it.
    """
    _discover()
    known = {f.gguf.architecture: (f, f.gguf) for f in FAMILIES.values() if f.gguf is not None}
    if name not in known:
        raise unsupported("general.architecture", name, f"known: {', '.join(sorted(known))}")
    return known[name]


def refused_settings(family: Family) -> tuple[str, ...]:
    """Return keys of config.json that only other families understand: they would change this family's computation."""
    _discover()
    own = {family.aliases.get(key, key) for key in family.settings}
    foreign = {name: None for f in FAMILIES.values() for key in f.settings for name in (key, f.aliases.get(key, key))}
    return tuple(name for name in foreign if name not in own)
