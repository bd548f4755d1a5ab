"""``capture``: from a PyTorch model to the IR, through ``torch.export``."""

from __future__ import annotations

import inspect
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ..aten.ir import IRGraph
from ..ops.casts import DROPOUTS
from ..support import progress
from ..support.errors import CaptureError
from ..support.host_arrays import to_torch
from . import derivatives
from .aliases import writes_strided_memory
from .attributes import Attributes
from .copied import writable
from .decompose import decompose
from .export_errors import failure, first_line
from .mutations import ArgumentChanges, by_key
from .pytrees import register_caches
from .shared_memory import sharing_advice
from .traceable import traceable_modules
from .translate import NeedsFunctionalForm, translate
from .zero_points import without_zero_points

__all__ = ["NUMBER", "TENSOR", "Capture", "capture", "capture_call"]


def capture(
    model: torch.nn.Module | ExportedProgram,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    strict: bool = False,
) -> IRGraph:
    """Return the IR of ``model``'s forward in eval mode, for the shapes, dtypes and values of the example inputs.

    Composite ATen ops (linear, conv2d, batch_norm, layer_norm, scaled_dot_product_attention ...) are kept, dropout is
    removed, and ``no_grad`` and ``autocast`` regions are inlined. Ops without a lowering are decomposed if that makes
    them native (:mod:`npu_compiler.frontend.decompose`). Buffers that forward modifies become ``state``. The values of
    constants and of non-persistent buffers are stored in the IR unless they are on the meta device. All keys of tied
    weights are listed, and their placeholders map to the first key, so a checkpoint needs that one only. A model that
    writes through views, or runs under an enabled autocast, is captured in functional form, in which
    ``run_decompositions({})`` replaces some composite ops (by ``_to_copy``, ``view``, ``slice_scatter`` ...).

    Args:
        model: a module on any device, including meta, or the result of ``torch.export.export``. The module is exported
            in eval mode and is not changed.
        example_inputs: the positional arguments of forward: a tuple or list, or a single tensor. Tensors and
            NumPy arrays, also inside lists, tuples and dicts, become graph inputs named after their argument. Python
            numbers, strings, booleans and None become constants. None for an ``ExportedProgram``.
        example_kwargs: the keyword arguments of forward.
        name: ``model_name`` of the result; None: the class name.
        strict: passed to ``torch.export``; True traces with TorchDynamo.

    Distributions do not check their parameters and samples unless they were made with ``validate_args=True``.

    State in plain Python attributes is refused, because torch.export would make constants of it. If forward changes
    such an attribute, the model runs twice in PyTorch, and the change is accepted if both results are equal.

    Raises:
        CaptureError: the model cannot become a static graph; the message says where and what to change.
    """
    return capture_call(model, example_inputs, example_kwargs=example_kwargs, name=name, strict=strict).ir


@dataclass(frozen=True)
class Capture:
    """A captured model and the structure of its arguments and results."""

    ir: IRGraph
    program: ExportedProgram
    """The source of ``ir``; its ``state_dict`` has the weights under the names that ``ir`` uses."""
    args: tuple[Any, ...]
    """The positional arguments of the captured call. ``ir.graph_inputs`` are the tensors among the leaves of
    ``(args, kwargs)``, in order."""
    kwargs: dict[str, Any]
    parameters: inspect.Signature | None
    """The parameters of forward; None if a decorator hides them."""
    structure: pytree.TreeSpec
    """The structure of the result."""
    leaves: list[Any]
    """The leaves of the result: ``TENSOR`` or, for a Python number that depends on data, ``NUMBER`` for each of
    ``ir.graph_outputs``, in order, and the values of all others."""
    returned: dict[int | str, Any]
    """Arguments that the model changes and returns; see ``ArgumentChanges``."""


@dataclass(frozen=True, eq=False)
class _Marker:
    name: str

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name  # the one of this module


# torch.export patches modules of PyTorch, and sets variables of the process, while it traces a model.
_TRACING = threading.RLock()

TENSOR, NUMBER = _Marker("TENSOR"), _Marker("NUMBER")


def capture_call(
    model: torch.nn.Module | ExportedProgram,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    strict: bool = False,
) -> Capture:
    """Capture a model with the structure of its arguments and result. Arguments and errors are those of ``capture``.
    Threads take turns."""
    with progress.step(f"capturing {name or type(model).__name__}"), _TRACING:
        return _captured(model, example_inputs, example_kwargs, name, strict)


def _captured(
    model: torch.nn.Module | ExportedProgram,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    name: str | None,
    strict: bool,
) -> Capture:
    fresh = isinstance(model, torch.nn.Module)
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError("a ScriptModule cannot be exported; pass the module that it was made from")
    if isinstance(model, torch.nn.Module):
        label = name or type(model).__name__
        if lazy := [n for n, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)]:
            raise CaptureError(f"{label}: {lazy[0]!r} has no shape before the first call; call the module once")
        args, kwargs = _positional(example_inputs), dict(example_kwargs or {})
        program, returned = _export(model, args, kwargs, label, strict)
    elif isinstance(model, ExportedProgram):
        label, program = name or "exported_program", model
        if example_inputs is not None or example_kwargs:
            raise CaptureError(f"{label}: an ExportedProgram has its example inputs; pass none")
        args, kwargs = program.example_inputs or ((), {})
        returned = {}
    else:
        raise CaptureError(
            f"expected a torch.nn.Module or a torch.export.ExportedProgram, got {type(model).__name__}; "
            "wrap a function in a module whose forward calls it"
        )
    program = without_zero_points(_without_eval_dropout(program, in_place=fresh), in_place=fresh)
    program, ir = _translated(program, label, fresh, _written(program, args, kwargs, returned))
    parameters, leaves = _parameters(model, args, kwargs), _result_leaves(program)
    return Capture(ir, program, args, kwargs, parameters, program.call_spec.out_spec, leaves, returned)


def _written(
    program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Mapping[int | str, Any]
) -> frozenset[str]:
    """The names of the graph inputs that may be written to, because the result has their new contents."""
    keys = [key for key, value in by_key(args, kwargs).items() for _ in pytree.tree_leaves(value)]
    inputs = [s.arg for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    return frozenset(str(i.name) for key, i in zip(keys, inputs, strict=False) if key in returned)


def _translated(
    program: ExportedProgram, label: str, fresh: bool, written: frozenset[str]
) -> tuple[ExportedProgram, IRGraph]:
    """The program in the form that the IR was made from, and the IR."""
    program, notes = decompose(program, in_place=fresh)
    try:
        if writes_strided_memory(program, trust_storages=fresh):
            raise NeedsFunctionalForm
        return program, translate(program, label, trust_storages=fresh, notes=notes, written=written)
    except NeedsFunctionalForm:
        # Only torch's own functionalisation can write through views. It is not the first choice, because it also
        # rewrites reshapes and casts.
        program, notes = decompose(_functional(program, label), in_place=True)
    try:
        return program, translate(program, label, trust_storages=fresh, notes=notes, written=written)
    except NeedsFunctionalForm as e:
        cause = str(e) or "an in-place operation writes through a view; use its out-of-place form"
        raise CaptureError(f"{label}: {cause}") from None


def _parameters(
    model: torch.nn.Module | ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.Signature | None:
    """The parameters of forward; None if a decorator hides them or a saved program does not have them."""
    if isinstance(model, torch.nn.Module):
        parameters = inspect.signature(model.forward)
    else:
        signature = model.module_call_graph[0].signature
        names = (signature and signature.forward_arg_names) or []
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    try:
        parameters.bind(*args, **kwargs)
    except TypeError:
        return None
    return parameters


def _result_leaves(program: ExportedProgram) -> list[Any]:
    results = [s for s in program.graph_signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
    return [_result_leaf(s.arg) for s in results]


def _result_leaf(argument: Any) -> Any:
    if isinstance(argument, ConstantArgument):
        return argument.value
    return TENSOR if isinstance(argument, TensorArgument) else NUMBER


def _positional(example_inputs: Any) -> tuple[Any, ...]:
    if example_inputs is None:
        return ()
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs)
    if isinstance(example_inputs, Mapping):
        raise CaptureError(
            "example_inputs: pass keyword arguments as example_kwargs, or wrap a dict argument in a tuple"
        )
    return (example_inputs,)


def _export(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], label: str, strict: bool
) -> tuple[ExportedProgram, dict[int | str, Any]]:
    """The program, and the arguments that the model modifies and returns."""
    register_caches(model)
    args, kwargs = pytree.tree_map_only(np.ndarray, to_torch, (args, kwargs))
    arguments, attributes = ArgumentChanges(model, watch=not strict), Attributes(model, watch=not strict)
    ordinary = _ordinary_tensors(model)
    with _eval_mode(model), torch.inference_mode(False), ordinary, traceable_modules(model), arguments, attributes:
        args, kwargs = pytree.tree_map_only(torch.Tensor, _ordinary, (args, kwargs))
        try:
            with _quiet():
                if strict:
                    program, differentiates = torch.export.export(model, args, kwargs, strict=True), False
                else:
                    program, differentiates = derivatives.export(model, args, kwargs, attributes.restore)
        except CaptureError as e:
            raise CaptureError(f"{label}: {e}") from None
        except Exception as e:  # torch.export documents no exception types
            raise CaptureError(f"{label}: {failure(e)}") from e
        arguments.check(label)
        returned = dict(arguments.returned)
        tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((args, kwargs))]
        unknown = any(isinstance(t, torch.Tensor) and t.is_meta for t in tensors)
        changes = sorted(attributes.changes)
        if changes and (unknown or attributes.matter(args, kwargs, differentiates)):
            names = ", ".join(map(repr, changes[:3])) + (" ..." if len(changes) > 3 else "")
            raise CaptureError(
                f"{label}: forward changes {names}, on which later calls depend; make it a buffer (register_buffer), "
                "which keeps its contents from call to call"
            )
        return program, returned


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what torch.export prints and warns about besides its error, which ``CaptureError`` says in one line.

    That is the partial graph on standard error; other text written there is passed on.
    """
    held, graph = io.StringIO(), ""
    noisy = [logging.getLogger(f"torch.{n}") for n in ("fx.experimental.symbolic_shapes", "_subclasses.fake_tensor")]
    for logger in noisy:
        logger.addFilter(_no_record)
    try:
        with warnings.catch_warnings(), redirect_stderr(held):
            warnings.filterwarnings("ignore", r"The tensor attributes? .*assigned during export")  # see Attributes
            yield
    except Exception as e:
        graph = f"{e.partial_fx_graph}\n" if hasattr(e, "partial_fx_graph") else ""
        raise
    finally:
        for logger in noisy:
            logger.removeFilter(_no_record)
        text = held.getvalue()
        sys.stderr.write(text.replace(graph, "") if graph else text)


def _no_record(record: logging.LogRecord) -> bool:
    return False


def _ordinary(t: torch.Tensor) -> torch.Tensor:
    """A tensor that torch.export can trace: a copy of one that was made in inference mode."""
    if not t.is_inference():
        return t
    copied = t.detach().clone()
    return torch.nn.Parameter(copied, t.requires_grad) if isinstance(t, torch.nn.Parameter) else copied


@contextmanager
def _ordinary_tensors(model: torch.nn.Module) -> Iterator[None]:
    """Ordinary tensors in place of the parameters and buffers that were made in inference mode."""
    tables: list[dict[str, Any]] = [table for m in model.modules() for table in (m._parameters, m._buffers)]
    held = [(table, name, t) for table in tables for name, t in table.items() if t is not None and t.is_inference()]
    copies = {id(t): _ordinary(t) for _, _, t in held}  # shared ones stay shared
    for table, name, t in held:
        table[name] = copies[id(t)]
    try:
        yield
    finally:
        for table, name, t in held:
            table[name] = t


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode. ``DataParallel`` calls its module directly instead of copies on every GPU."""
    modes = [(m, m.training) for m in model.modules()]
    spread = [(m, m.device_ids) for m in model.modules() if isinstance(m, torch.nn.DataParallel)]
    try:
        model.eval()
    except NotImplementedError:  # a module of an ExportedProgram has a fixed mode
        for module, _ in modes:
            module.training = False
    for wrapper, _ in spread:
        wrapper.device_ids = []
    try:
        yield
    finally:
        for wrapper, devices in spread:
            wrapper.device_ids = devices
        for module, training in modes:
            module.training = training


def _without_eval_dropout(program: ExportedProgram, in_place: bool) -> ExportedProgram:
    """The program without dropout in eval mode, which returns its argument: an alias that neither schemas nor
    functionalisation know."""

    def graphs(p: ExportedProgram) -> list[torch.fx.GraphModule]:
        return [m for m in p.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]

    def is_identity(node: torch.fx.Node) -> bool:
        return str(node.target) in DROPOUTS and len(node.args) == 3 and node.args[2] is False

    if not any(is_identity(n) for g in graphs(program) for n in g.graph.nodes):
        return program
    program = writable(program, in_place)
    for module in graphs(program):
        for node in list(module.graph.nodes):
            if is_identity(node):
                source = node.args[0]
                node.replace_all_uses_with(source)
                if module is program.graph_module:
                    program.graph_signature.replace_all_uses(node.name, source.name)
                module.graph.erase_node(node)
        module.recompile()
    return program


def _functional(program: ExportedProgram, label: str) -> ExportedProgram:
    try:
        with torch.no_grad():
            functional: ExportedProgram = program.run_decompositions({})
    except Exception as e:  # as for torch.export
        cause = f"removing in-place operations failed: {first_line(e)}"
        raise CaptureError(f"{label}: {cause}{sharing_advice(program)}") from e
    if _unfold_gradients(functional) > _unfold_gradients(program):
        cause = "PyTorch cannot make that functional: it takes elements outside of all windows for zeros"
        raise CaptureError(f"{label}: an in-place operation writes through unfold(); {cause}; write to slices instead")
    return functional


def _unfold_gradients(program: ExportedProgram) -> int:
    """How many gradients of ``unfold`` there are, which torch also takes for the inverse of that view."""
    modules = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    return sum(n.target is torch.ops.aten.unfold_backward.default for m in modules for n in m.graph.nodes)
