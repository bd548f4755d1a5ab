"""Weights in device memory, in the layouts of a program: its recipes are evaluated over a state_dict."""

from __future__ import annotations

import difflib
import logging
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.graph.graph import Graph, Node, Value
from npu_compiler.graph.interp import evaluate_node
from npu_compiler.graph.structure import main_weight, structural_key
from npu_compiler.support import dtypes, progress
from npu_compiler.support.errors import ArtifactError, BackendError, IncompressibleError, WeightError
from npu_compiler.support.ordering import depth_first
from npu_compiler.weights.files import WeightSource, open_weights
from npu_compiler.weights.format import block_format, find_layout

from .arguments import check_order
from .arrays import ALIGNMENT, check_memory, widens
from .device import DeviceBuffer
from .registry import get_backend

if TYPE_CHECKING:
    from .backends.base import Backend

_log = logging.getLogger(__name__)

_LISTED = 8  # problems named in one message
_NAN_BLOCK = 1 << 20


class WeightStore(Mapping[str, DeviceBuffer]):
    """Device buffers by recipe output, for any number of executors. ``state``: initial values by state key.
    ``recipes``: the recipe of each buffer, if known."""

    def __init__(
        self,
        buffers: Mapping[str, DeviceBuffer],
        state: Mapping[str, np.ndarray],
        recipes: Mapping[str, Value] | None = None,
    ):
        self._buffers = dict(buffers)
        self.state = dict(state)
        self.recipes = dict(recipes or {})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "recipes": {}}  # they serve only to share memory, and are too deep to pickle

    def __deepcopy__(self, memo: Any) -> WeightStore:
        return self  # no run writes weights

    def __getitem__(self, name: str) -> DeviceBuffer:
        return self._buffers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory; a buffer with several names counts once."""
        return sum(b.size_bytes for b in {id(b): b for b in self._buffers.values()}.values())


class TakesWeights(ABC):
    """An executor that gets weights from :meth:`load_weights` or together with a run."""

    _taken: Any = None  # the weights that came with the last run

    @abstractmethod
    def load_weights(self, weights: Any) -> None:
        """Replace the weights, and forget which ones came with the last run."""

    def take_weights(self, weights: Any) -> None:
        """Load ``weights``, unless the last run had the same object."""
        if weights is not self._taken:
            self.load_weights(weights)
            self._taken = weights


def load_weights(
    program: CompiledProgram, source: Any = None, backend: Backend | None = None, shared: Iterable[WeightStore] = ()
) -> WeightStore:
    """Fill the program's weight buffers.

    ``source``: a dict of numpy arrays or torch tensors, a ``.safetensors`` or ``.npz`` file, or a directory of
    safetensors shards; ``None`` if the program needs no tensors. Tensors that the program does not read are ignored.
    Safetensors files are mapped, not copied, and must not be shortened meanwhile (replace them by renaming). Floats and
    integers of a narrower type are widened, so a float16 or bfloat16 checkpoint fits a float32 model.
    ``shared``: stores of the same source on the same backend; buffers that they hold in the layout of this program are
    shared.

    Raises ``WeightError`` with the name of every tensor that is missing or differs in shape or dtype from the compiled
    model. Warns (``RuntimeWarning``) about tensors that contain NaN.
    """
    check_order(program, source, backend)
    backend = backend or get_backend(program.target)
    weights = open_weights({} if source is None else source)
    _check(program, weights)
    recipes = program.recipes
    wanted = {b.name for b in program.buffers if b.constant}
    outputs = {n: v for n, v in recipes.outputs if n in wanted}
    held = _held(outputs, shared)
    outputs = {n: v for n, v in outputs.items() if n not in held}
    room = sum(v.numel * dtypes.DTYPES[v.dtype].size + ALIGNMENT for v in set(outputs.values()))
    formats = {b.name: b.format for b in program.buffers if b.format}
    with backend.block(room):
        buffers = _Evaluation(recipes, weights, backend, formats).run(outputs)
    return WeightStore({**held, **buffers}, _initial_state(program, weights), dict(recipes.outputs))


def _held(outputs: Mapping[str, Value], shared: Iterable[WeightStore]) -> dict[str, DeviceBuffer]:
    """Return the buffers of those ``outputs`` for which a store has the same recipe, by name."""
    numbers: dict[Hashable, int] = {}

    def number(values: Mapping[str, Value]) -> dict[str, tuple[int, int]]:
        """Return (number of its node, index) by name; nodes that compute the same have the same number."""
        known: dict[Node, int] = {}
        for node in _needed(list(values.values())):
            key = structural_key(node, [(known[v.node], v.index) for v in node.inputs])
            known[node] = numbers.setdefault(key, len(numbers))
        return {name: (known[v.node], v.index) for name, v in values.items()}

    buffers = {n: store[name] for store in shared for name, n in number(store.recipes).items() if name in store}
    return {name: buffers[n] for name, n in number(outputs).items() if n in buffers} if buffers else {}


def _check(program: CompiledProgram, source: WeightSource) -> None:
    names = set(source.names())
    missing = [w.key for w in program.weights if w.key not in names]
    if missing:
        listed = _listed(missing, ", ")
        near = difflib.get_close_matches(missing[0], sorted(names), 1)
        raise WeightError(
            f"{source.origin} lacks {len(missing)} of the {len(program.weights)} tensors that program {program.name!r} "
            f"needs: {listed}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    problems = []
    for w in program.weights:
        if (problem := mismatch(source, w.key, w.shape, w.dtype)) is not None:
            problems.append(problem)
    if problems:
        listed = _listed(problems, "; ")
        raise WeightError(f"{source.origin} does not fit program {program.name!r}: weight {listed}; convert them")
    extra = names - {w.key for w in program.weights} - {b.name for b in program.buffers if b.kind == "state"}
    if extra:
        _log.debug("%s: %d tensors are not used: %s", source.origin, len(extra), ", ".join(sorted(extra)))


def mismatch(source: WeightSource, key: str, shape: Sequence[int], dtype: str) -> str | None:
    """Return how a tensor of ``source`` differs from the given shape and dtype, or None if it fits or can be
    widened."""
    found, held = source.spec(key)
    if found == tuple(shape) and (held == dtype or widens(dtypes.numpy_dtype(held), dtypes.numpy_dtype(dtype))):
        return None
    return f"{key!r} is {held}{list(found)}, expected {dtype}{list(shape)}"


def read_as(source: WeightSource, key: str, dtype: str) -> np.ndarray:
    """Return a tensor that fits (see :func:`mismatch`) in ``dtype``; it may share memory with the source."""
    return source.read(key).astype(dtypes.numpy_dtype(dtype), copy=False)


def _listed(items: list[str], separator: str) -> str:
    more = len(items) - _LISTED
    return separator.join([*items[:_LISTED], *([f"and {more} more"] if more > 0 else [])])


def _initial_state(program: CompiledProgram, source: WeightSource) -> dict[str, np.ndarray]:
    names, recipes = set(source.names()), dict(program.recipes.outputs)
    state = {}
    for b in program.buffers:
        if b.kind == "state" and b.name not in names and b.name in recipes:
            (state[b.name],) = evaluate_node(recipes[b.name].node, [])
        if b.kind == "state" and b.name in names:
            if (problem := mismatch(source, b.name, b.shape, b.dtype)) is not None:
                raise WeightError(f"{source.origin} does not fit program {program.name!r}: state {problem}; convert it")
            state[b.name] = read_as(source, b.name, b.dtype).copy()
    return state


class _Evaluation:
    """One pass over a recipe graph. Values are computed when an output needs them and freed after their last use."""

    def __init__(self, recipes: Graph, source: WeightSource, backend: Backend, formats: Mapping[str, str]):
        self._recipes, self._source, self._backend, self._formats = recipes, source, backend, formats
        self._held: dict[Value, np.ndarray] = {}
        self._warned: set[str] = set()

    def run(self, outputs: Mapping[str, Value]) -> dict[str, DeviceBuffer]:
        order = _needed(list(outputs.values()), self._blocks_held)
        uses = Counter(v for node in order for v in node.inputs) + Counter(set(outputs.values()))
        names: dict[Value, list[str]] = {}
        for name, v in outputs.items():
            names.setdefault(v, []).append(name)
        made: dict[str, DeviceBuffer] = {}
        with progress.step("packing weights", len(order)) as step:
            for node in order:
                self._evaluate(node)
                for v in node.outputs:
                    if v in names:
                        self._check_formats(names[v], v)
                        made.update(dict.fromkeys(names[v], self._backend.allocate_buffer(self._held[v])))
                        uses[v] -= 1
                uses.subtract(node.inputs)
                for v in {*node.inputs, *node.outputs}:
                    if uses[v] <= 0:
                        self._held.pop(v, None)
                step.advance()
        return made

    def _check_formats(self, names: list[str], v: Value) -> None:
        """Check weights in a format that no ``pack`` node of it made, before a kernel reads them."""
        for name in names:
            format = self._formats.get(name)
            if format and not (v.op == "pack" and v.node.attrs["layout"] == format):
                check_packed(format, name, self._held[v])

    def _blocks_held(self, node: Node) -> bool:
        """Whether the source already holds the result of ``node``: a matrix in the blocks of a weight format."""
        if node.op != "quantize" or node.inputs[0].op != "weight":
            return False
        blocks = self._source.blocks(node.inputs[0].node.attrs["key"], block_format(node.attrs["format"]))
        if blocks is None or blocks.shape != node.out.shape:
            return False
        self._held[node.out] = blocks
        return True

    def _evaluate(self, node: Node) -> None:
        if node.outputs and node.outputs[0] in self._held:
            return
        if node.op == "weight":
            array = read_as(self._source, node.attrs["key"], node.out.dtype)
            self._warn_nan(node.attrs["key"], array)
            self._held[node.out] = array
            return
        for v in node.outputs:
            check_memory(v.numel * dtypes.DTYPES[v.dtype].size, "a weight recipe")
        try:
            with np.errstate(all="ignore"):
                arrays = evaluate_node(node, [self._held[v] for v in node.inputs])
        except IncompressibleError as error:
            raise IncompressibleError(
                f"weight {main_weight(node.out)!r}: {error}; compile with weights=None (--weights none)"
            ) from None
        except MemoryError:
            raise BackendError(f"there is no memory to compute the weight recipe {node!r}") from None
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ArtifactError(f"a weight recipe cannot be evaluated: {node!r}: {error}") from None
        for v, array in zip(node.outputs, arrays, strict=True):
            if array.shape != v.shape:
                raise ArtifactError(f"a weight recipe makes {list(array.shape)} where {v!r} is declared")
            self._held[v] = array

    def _warn_nan(self, key: str, array: np.ndarray) -> None:
        if key not in self._warned and _has_nan(array):
            self._warned.add(key)
            warnings.warn(f"weight {key!r} contains NaN", RuntimeWarning, stacklevel=5)


def check_packed(format: str, name: str, array: np.ndarray) -> None:
    """Raise ``ArtifactError`` if the packed bytes of weight ``name`` would make a kernel access other memory."""
    try:
        find_layout(format)[1].check(array)
    except ValueError as error:
        raise ArtifactError(f"weight {name!r} is damaged: {error}") from None


def _needed(outputs: list[Value], is_leaf: Callable[[Node], bool] = lambda node: False) -> list[Node]:
    """Return the nodes that ``outputs`` depend on, depth first, so that few values are held at a time. The inputs of a
    leaf are not needed."""
    return depth_first((v.node for v in outputs), lambda n: [] if is_leaf(n) else [v.node for v in n.inputs])


def _has_nan(array: np.ndarray) -> bool:
    """Return whether an array has a NaN. Half types are tested by their bits, in blocks, because ``isnan`` has no
    vectorised code for them."""
    if array.dtype.itemsize == 2 and dtypes.is_float(dtypes.name_of(array.dtype)):
        infinity = 0x7C00 if array.dtype == np.float16 else 0x7F80
        bits = np.ascontiguousarray(array).reshape(-1).view(np.uint16)
        blocks = (bits[i : i + _NAN_BLOCK] & 0x7FFF for i in range(0, bits.size, _NAN_BLOCK))
        return any(bool((block > infinity).any()) for block in blocks)
    if array.dtype.kind not in "fc":
        return False
    return bool(array.size and np.isnan(np.min(array)))
