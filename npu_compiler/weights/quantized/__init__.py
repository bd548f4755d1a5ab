"""Checkpoints whose matrices are quantised: the layouts in which Hugging Face directories publish them.

``config.json`` names the method in its ``quantization_config``; the module of that method reads the tensors. Each
matrix keeps its numbers: in the blocks of a weight format that holds exactly them (``Matrix.format``), else as
elements. All other weights are read as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ...support.errors import ConfigError, WeightError
from ...support.records import Field, show
from ..files import Spec, TensorFiles, WeightSource
from ..format import BlockFormat
from . import awq, compressed_tensors, fp8, gptq
from .matrix import Matrix
from .tensors import Tensors

__all__ = ["METHODS", "QuantizedFiles", "open_quantized"]

METHODS: dict[str, Callable[[Tensors, dict[str, Field]], dict[str, Matrix]]] = {
    "awq": awq.read,
    "gptq": gptq.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
}
# Scales of activations that were measured before, and of KV caches: both keep their precision here.
_UNUSED = re.compile(r"\.(input|output|k|v|q|prob|activation)_(scale|zero_point)$")


class QuantizedFiles(WeightSource):
    """Tensor files in which the weights of some modules are quantised. :meth:`read` returns their elements in float32.

    Args:
        files: the files.
        matrices: the quantised matrices by module.
        tensors: the access that they were made with.
        activations: see :attr:`WeightSource.activations`.
    """

    def __init__(
        self,
        files: TensorFiles,
        matrices: Mapping[str, Matrix],
        tensors: Tensors,
        activations: str | None = None,
    ):
        self.origin, self._activations = files.origin, activations
        self._files, self._tensors = files, tensors
        self._matrices = {f"{module}.weight": m for module, m in matrices.items()}
        self._orders: dict[str, np.ndarray] = {}

    @property
    def activations(self) -> str | None:
        return self._activations

    def names(self) -> Iterable[str]:
        plain = self._tensors.others({*self._tensors.used, *self._matrices})
        return [*self._matrices, *self._orders, *sorted(n for n in plain if not _UNUSED.search(n))]

    def spec(self, name: str) -> Spec:
        if name in self._orders:
            return self._orders[name].shape, "int64"
        return (self._matrices[name].shape, "float32") if name in self._matrices else self._files.spec(name)

    def read(self, name: str) -> np.ndarray:
        if name in self._orders:
            return self._orders[name]
        return self._matrices[name].elements() if name in self._matrices else self._files.read(name)

    def permutation(self, name: str) -> np.ndarray | None:
        """Return the order in which the columns of a quantised matrix fit a weight format, int64 [K]; None: it needs
        none, or does not fit in any order."""
        found = self._matrices[name].permutation if name in self._matrices else None
        return found if found is not None and self._matrices[name].permuted().format is not None else None

    def permute(self, name: str, order: str) -> None:
        """Give a matrix the order of columns that :meth:`permutation` returns. ``order``: the name of a tensor that has
        it, or an empty text."""
        columns = self.permutation(name)
        assert columns is not None
        if order:
            self._orders[order] = columns
        self._matrices[name] = self._matrices[name].permuted()

    def block_format(self, name: str) -> BlockFormat | None:
        return self._matrices[name].format if name in self._matrices else self._files.block_format(name)

    def blocks(self, name: str, format: BlockFormat) -> np.ndarray | None:
        if name not in self._matrices:
            return self._files.blocks(name, format)
        return self._matrices[name].blocks() if self._matrices[name].format is format else None

    def without_format(self) -> list[str]:
        """Return the names of the quantised matrices whose numbers no weight format holds."""
        return [name for name, m in self._matrices.items() if m.format is None]

    def is_padding(self, name: str) -> bool:
        """Return True for the bias of a quantised module if it is 0: some writers give all modules one."""
        module, _, leaf = name.rpartition(".")
        return leaf == "bias" and f"{module}.weight" in self._matrices and self._tensors.is_zero(name)


def open_quantized(files: TensorFiles, config: Any, path: str) -> QuantizedFiles:
    """Return the source of a checkpoint's weights.

    Args:
        config: the ``quantization_config`` of its ``config.json``.
        path: of that setting, for messages.

    Raises:
        ConfigError: the method or one of its settings is not supported.
        WeightError: a quantised module lacks a tensor, or has one of another dtype or shape; or none is quantised.
    """
    settings = Field(config, path, ConfigError).mapping()
    said = settings.get("quant_method")
    method = said.value if said is not None else None
    if not isinstance(method, str) or method not in METHODS:
        known = f"supported are {', '.join(METHODS)}, and GGUF files of all common types"
        raise ConfigError(f"{path}.quant_method = {show(method)} is not supported; {known}; or use the original model")
    tensors = Tensors(files)
    matrices = METHODS[method](tensors, settings)
    both = next((m for m in sorted(matrices) if tensors.has(m, "weight") and f"{m}.weight" not in tensors.used), None)
    if both is not None:
        raise WeightError(f"{files.origin} has {both!r} twice: as {f'{both}.weight'!r} and quantised")
    if not matrices and not _is_dense(settings):
        raise WeightError(f"{files.origin}: {path} says {method}, but no tensor is quantised: convert the model again")
    activations = compressed_tensors.activations(settings) if method == "compressed-tensors" else None
    return QuantizedFiles(files, matrices, tensors, activations)


def _is_dense(settings: Mapping[str, Field]) -> bool:
    return "format" in settings and settings["format"].value == "dense"
