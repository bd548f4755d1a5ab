"""Runs a network on sample inputs, to find the ranges of its tensors, and in both forms, to find the errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from npu_compiler import compile as compile_ir
from npu_compiler.aten.ir import IRGraph, Key
from npu_compiler.support.progress import step
from npu_runtime import Executor

from .network import Network
from .ranges import Affine, Observed

Inputs = Mapping[str, np.ndarray]
_RESULT = "result"  # the name of a network's own first output


@dataclass
class LayerError:
    """What quantisation does to a layer.

    ``relative_rms``: the error of its results in the quantised network, which has those of the layers before it, beside
    the RMS of the exact ones. ``weight_error``: that of its weight. ``activation``: scale and zero point of its input.
    """

    layer: str
    op: str
    shape: tuple[int, ...]
    activation: Affine
    weight_error: float
    error: float = 0.0
    size: float = 0.0

    @property
    def relative_rms(self) -> float:
        """The relative RMS error of the results."""
        return float(np.sqrt(self.error / self.size)) if self.size else 0.0


def executor(ir: IRGraph, weights: Mapping[str, np.ndarray], target: str) -> Executor:
    """Compile a graph completely for the target and load its weights. Raises as ``npu_compiler.compile``."""
    return Executor(compile_ir(ir, target), weights)


def observe(network: Network, samples: Sequence[Inputs], target: str) -> dict[Key, Observed]:
    """Return what was seen of each tensor that becomes 8-bit and has parameters of its own."""
    keys = {f"o{i}": key for i, key in enumerate(k for k in network.sites if k not in network.shared)}
    inputs = {t.name: network.ir.key(t) for t in network.ir.graph_inputs}
    computed = {name: key for name, key in keys.items() if key not in inputs.values()}
    run = executor(network.with_outputs(network.ir, computed), network.weights, target) if computed else None
    seen = {key: Observed() for key in keys.values()}
    with step("calibrating", len(samples)) as progress:
        for sample in samples:
            for name, key in inputs.items():
                if key in seen:
                    seen[key].add(sample[name])
            for name, values in run.run(dict(sample)).items() if run is not None else ():
                seen[computed[name]].add(values)
            progress.advance()
    return seen


def parameters(network: Network, seen: Mapping[Key, Observed], method: str) -> dict[Key, Affine]:
    """Return scale and zero point of every tensor that becomes 8-bit."""
    own = {key: o.affine(method) for key, o in seen.items()}
    return {key: own[network.shared.get(key, key)] for key in network.sites}


class Comparison:
    """Both forms of a network, compiled so that they return the results of every layer besides their own.

    ``affine``: the parameters of the 8-bit tensors. ``quantised``: the quantised graph and its weights. Raises as
    ``npu_compiler.compile``.
    """

    def __init__(
        self, network: Network, affine: Mapping[Key, Affine], quantised: tuple[IRGraph, Mapping[str, np.ndarray]],
        target: str,
    ):  # fmt: skip
        self.network, self.affine = network, affine
        self.keys = {f"o{i}": (name, 0) for i, name in enumerate(network.layers)}
        keys = {**self.keys, _RESULT: network.ir.key(network.ir.graph_outputs[0])}
        self.exact = executor(network.with_outputs(network.ir, keys), network.weights, target)
        self.rounded = executor(network.with_outputs(quantised[0], keys), quantised[1], target)

    def errors(self, samples: Iterable[Inputs]) -> list[LayerError]:
        """Compare the results of every layer."""
        source = {name: self.network.ir.key(layer.node.inputs[0]) for name, layer in self.network.layers.items()}
        rows = {
            name: LayerError(
                layer.label, layer.node.op_type, layer.weight.shape, self.affine[source[name]], layer.weight_error
            )
            for name, layer in self.network.layers.items()
        }
        for sample in samples:
            want, got = self.exact.run(dict(sample)), self.rounded.run(dict(sample))
            for output, (name, _) in self.keys.items():
                rows[name].error += float(np.square(got[output].astype(np.float64) - want[output]).sum())
                rows[name].size += float(np.square(want[output].astype(np.float64)).sum())
        return list(rows.values())

    def agreement(self, samples: Iterable[Inputs]) -> int:
        """Return for how many samples both find the same class most likely."""

        def best(run: Executor, sample: Inputs) -> int:
            return int(np.argmax(run.run(dict(sample))[_RESULT]))

        return sum(best(self.exact, s) == best(self.rounded, s) for s in samples)
