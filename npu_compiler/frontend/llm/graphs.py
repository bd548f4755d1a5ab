"""Captures the entry points of a decoder from its config, without weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache

import torch

from ...aten.ir import IRGraph
from ...support.errors import ConfigError
from ..export import capture
from ..repeats import repeated, traced_once
from ..tensors import tensor_to_numpy
from .config import LLMConfig
from .decoders import GreedyDecoder, SamplingDecoder, ScoringDecoder
from .modules import Decoder

__all__ = ["llm_graphs", "scoring_graphs"]

_Input = tuple[tuple[int, ...], torch.dtype]  # shape and dtype


def llm_graphs(
    config: LLMConfig,
    *,
    max_len: int,
    chunks: Sequence[int] = (32, 128),
    dtype: str | None = None,
    device_sampling: bool = False,
    kv_cache: str | None = None,
) -> dict[str, IRGraph]:
    """Capture the graphs ``prefill_{N}`` for each chunk size N up to ``max_len``, and ``decode`` for one token.

    Each takes ``token_ids`` int64[1, N], ``positions`` int64[N] and ``last`` int64[1] (which ``decode`` ignores) and
    returns logits float32[1, vocab]; see ``Decoder``. Weights have the names of ``parameter_shapes``. All graphs share
    the states ``k_cache.{i}`` and ``v_cache.{i}`` [1, KV heads, max_len, head_dim], and with ``kv_cache`` the scales of
    their rows, ``k_cache.{i}_scale`` and ``v_cache.{i}_scale``.

    Args:
        max_len: positions in the KV cache.
        dtype: the dtype of weights, activations and cache: 'bfloat16', 'float16', 'float32'; None: ``config.dtype``.
        device_sampling: add ``greedy``, whose next input is its own token (see ``GreedyDecoder``), and ``sample``,
            which returns a top-k digest of the logits (see ``SamplingDecoder``).
        kv_cache: 'int8', 'fp8': caches hold 8-bit integers or floats with a scale for each row; None: numbers of
            ``dtype``.

    Raises:
        ConfigError: ``max_len`` or a chunk size is not positive, ``max_len`` exceeds the model's learned positions, or
            ``kv_cache`` is unknown.
    """
    if any(n < 1 for n in chunks):
        raise ConfigError(f"chunks = {tuple(chunks)}: sizes of prefill chunks are positive")
    config = dataclasses.replace(config, dtype=dtype or config.dtype)
    sizes = {f"prefill_{n}": n for n in sorted(set(chunks)) if n <= max_len} | {"decode": 1}
    graphs = _captured(Decoder, config, max_len, {name: _example(n) for name, n in sizes.items()}, kv_cache)
    if device_sampling:
        token, position, _ = _example(1)
        graphs |= _captured(GreedyDecoder, config, max_len, {"greedy": ()}, kv_cache)
        sample = (token, position, ((1,), torch.float32))
        graphs |= _captured(SamplingDecoder, config, max_len, {"sample": sample}, kv_cache)
    return graphs


def scoring_graphs(
    config: LLMConfig, *, max_len: int, chunk: int = 128, kv_cache: str | None = None
) -> dict[str, IRGraph]:
    """Capture the graph ``score`` for ``chunk`` tokens, at most ``max_len``, which rates given tokens: see
    ``ScoringDecoder``. Weights, states and ``kv_cache`` are those of :func:`llm_graphs`.

    Raises:
        ConfigError: as :func:`llm_graphs`.
    """
    example = _example(min(chunk, max_len), following=True)
    return _captured(ScoringDecoder, config, max_len, {"score": example}, kv_cache)


def _captured(
    kind: type[Decoder], config: LLMConfig, max_len: int, inputs: dict[str, tuple[_Input, ...]], kv_cache: str | None
) -> dict[str, IRGraph]:
    """Return a graph for each name, with inputs of these shapes and dtypes."""
    graphs, names = _capture(_Request(kind, config, max_len, tuple(inputs.items()), kv_cache))
    return {name: repeated(graph, names) for name, graph in graphs.items()}


@dataclasses.dataclass(frozen=True)
class _Request:
    """All that the graphs of a decoder depend on."""

    kind: type[Decoder]
    config: LLMConfig
    max_len: int
    inputs: tuple[tuple[str, tuple[_Input, ...]], ...]
    kv_cache: str | None


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _capture(wanted: _Request) -> tuple[dict[str, IRGraph], list[str]]:
    """The graphs with marks in place of layers that are alike, and the names of parameters and buffers in their order.

    A model that is compiled again, for another target or with its weights in another format, is captured once.
    """
    with torch.device("meta"):
        decoder = wanted.kind(wanted.config, wanted.max_len, kv_cache=wanted.kv_cache)
    constants = {k: tensor_to_numpy(b) for k, b in decoder.named_buffers() if not b.is_meta}
    decoder.to("meta")
    names = [name for tensors in (decoder.named_parameters(), decoder.named_buffers()) for name, _ in tensors]
    graphs = {}
    for name, specs in wanted.inputs:
        example = tuple(torch.zeros(shape, dtype=dtype, device="meta") for shape, dtype in specs)
        with traced_once(decoder, decoder.model.layers, example):
            graph = capture(decoder, example, name=wanted.config.model_type)
        for placeholder, key in list(graph.weight_name_mapping.items()):
            if key in constants:  # the copy on the meta device has no values
                del graph.weight_name_mapping[placeholder]
                graph.constants[placeholder] = constants[key]
        graph.weights = [w for w in graph.weights if w.name not in constants]
        for node in graph.nodes:
            node.attrs.pop("device", None)  # the meta device is this function's, not the model's
        graphs[name] = graph
    return graphs, names


def _example(n: int, following: bool = False) -> tuple[_Input, _Input, _Input]:
    """Tokens, positions, and the last token or those that follow."""
    return ((1, n), torch.int64), ((n,), torch.int64), ((n if following else 1,), torch.int64)
