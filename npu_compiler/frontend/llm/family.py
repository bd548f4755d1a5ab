"""``Family``: everything that is particular to one family of decoders. One file of ``families/`` declares each.

Shared code (config, checkpoint, modules) asks a family's fields and never its name. Files are found by themselves, so a
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
    """'attention_bias': all four projections of attention have a bias."""
    bias = keys.flag("attention_bias", False)
    return {"qkv_bias": bias, "output_bias": bias}


def gguf_names(**other: str) -> TensorMap:
    """The tensors of a GGUF file; ``other``: the norms (by our names) that an architecture names in its own way."""
    return TensorMap(names={**GGUF_NAMES, **other}, prefix="", layer="blk.{}.")


@dataclass(frozen=True)
class GGUF:
    """How GGUF files say a family.

    Attributes:
        architecture: the value of 'general.architecture'.
        tensors: where the weights are.
        present: our key of a setting -> a tensor; the setting is true if the file has the tensor.
        complete: receives the settings read so far, by our keys, and gives those that files of this architecture leave
            to the program that reads them.
    """

    architecture: str
    tensors: TensorMap = field(default_factory=gguf_names)
    present: Mapping[str, str] = field(default_factory=dict)
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}


@dataclass(frozen=True)
class Family:
    """A family of decoders.

    Attributes:
        model_type: of config.json. It means what the class of that name in transformers computes.
        wrappers: model types of multimodal models -> the key of their config.json under which this family's is.
        aliases: our key of a setting -> the family's key, where config.json calls it in its own way.
        defaults: of settings that config.json may leave out, by the family's keys.
        settings: our keys of settings that ``read`` understands and that would change the computation of other
            families: those refuse them.
        fixed: fields of ``LLMConfig`` that all models of the family have in common.
        read: gives the fields of ``LLMConfig`` that depend on the family's own settings; they go before what the shared
            reader would say.
        tensors: where safetensors files keep the weights.
        unused: a regular expression for tensors that a file may have and the computation does not need.
        gguf: None if no GGUF architecture holds the family.
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
    """The family of a config.json's model type.

    Raises:
        ConfigError: no family has it.
    """
    _discover()
    if name not in FAMILIES:
        raise unsupported("model_type", name, f"known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def by_architecture(name: str) -> tuple[Family, GGUF]:
    """The family of a GGUF file's 'general.architecture'.

    Raises:
        ConfigError: no family has it.
    """
    _discover()
    known = {f.gguf.architecture: (f, f.gguf) for f in FAMILIES.values() if f.gguf is not None}
    if name not in known:
        raise unsupported("general.architecture", name, f"known: {', '.join(sorted(known))}")
    return known[name]


def refused_settings(family: Family) -> tuple[str, ...]:
    """Keys of config.json that other families understand, and with which a model of this one would be another model."""
    _discover()
    own = {family.aliases.get(key, key) for key in family.settings}
    foreign = {name: None for f in FAMILIES.values() for key in f.settings for name in (key, f.aliases.get(key, key))}
    return tuple(name for name in foreign if name not in own)
