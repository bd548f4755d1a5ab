"""A write to a result reaches exactly those tensors that it reaches in PyTorch: every declaration says what its results
are to its first argument (``ops.Result``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from npu_compiler.aten.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.graph import interp
from npu_compiler.ops import REGISTRY
from npu_compiler.ops.lower import lower_ir
from npu_compiler.ops.registry import ON_HOST, Result
from npu_compiler.support.errors import CompileError

from .cases import Case, encode, to_numpy

# PyTorch does not define what a write to a result of these does to the argument: its export treats them as new.
UNDEFINED = ("aten._unsafe_view.default", "aten.unsafe_")

DECLARED = {**{name: op.result for name, op in REGISTRY.items()}, **ON_HOST}


def family_cases(family: str) -> Iterator[Case]:
    for op_type, op in REGISTRY.items():
        if op.family == family and not op_type.startswith((*UNDEFINED, "quantized_decomposed.")):
            yield from (Case(op_type, op, number, op.dtypes[0]) for number in range(len(op.samples)))


def row_major(value: Any) -> Any:
    """As the memory of a program is."""
    return value.contiguous().clone() if isinstance(value, torch.Tensor) else value


def tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


def eager(case: Case, written: int) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """The arguments and the results after result ``written`` was set to zero; None if PyTorch cannot do that."""
    args, kwargs = case.called_with(row_major)
    try:
        out = case.overload(*args, **kwargs)
        results = tensors(out)
        results[written].zero_()
    except (RuntimeError, IndexError):  # elements of the result share memory; no kernel; no such result
        return None
    return tensors((args, kwargs)), results


def graph_of(case: Case, results: list[torch.Tensor], written: int) -> tuple[IRGraph, dict[str, np.ndarray]]:
    """The call, a write to one of its results, and all arguments and results as outputs."""
    args, kwargs = tree_map(row_major, case.arguments)
    inputs, attrs = encode(case.overload._schema, args, kwargs)

    def spec(name: str, t: torch.Tensor, producer: tuple[str, int] | None) -> TensorSpec:
        return TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), producer)

    leaves = [spec(f"x{i}", t, (f"x{i}", 0)) for i, t in enumerate(inputs)]
    made = [spec(f"y{i}", t, ("call", i)) for i, t in enumerate(results)]
    call = OpNode("call", case.op_type, leaves, [spec(t.name, r, None) for t, r in zip(made, results, strict=True)])
    call.attrs.update(attrs)
    write = OpNode("write", "aten.zero_.default", [made[written]], [spec("z", results[written], None)])
    ir = IRGraph(str(case), leaves, [*leaves, *made], [], {}, [call, write])
    return ir, {t.name: to_numpy(x) for t, x in zip(leaves, inputs, strict=True)}


@pytest.mark.parametrize("family", sorted({op.family for op in REGISTRY.values()}))
@pytest.mark.filterwarnings("ignore")
def test_a_write_to_a_result_reaches_what_it_reaches_in_pytorch(family: str) -> None:
    wrong = []
    for case in family_cases(family):
        for written in (0, 1):
            if (found := eager(case, written)) is None:
                continue
            arguments, results = found
            ir, inputs = graph_of(case, results, written)
            try:
                values = list(interp.run(lower_ir(ir), inputs).values())
            except CompileError:  # what a program cannot express, it refuses
                continue
            for name, got, want in zip(ir.output_names(), values, [*arguments, *results], strict=True):
                if not np.allclose(*(np.asarray(v, np.float64) for v in (got, to_numpy(want))), 0.05, 0.05, True):
                    wrong.append(f"{case} {case.sample}: {name} after a write to y{written}")
    assert not wrong, "\n".join(wrong)


def test_declarations_agree_with_pytorchs_schemas() -> None:
    """Ops whose schema says that a result may be in the memory of the first argument are declared so, and others only
    where PyTorch's schema leaves it out."""
    annotated = set()
    for schema in torch._C._jit_get_all_schemas():
        first = schema.arguments[0].alias_info if schema.arguments else None
        known = torch._C._dispatch_has_kernel(f"{schema.name}.{schema.overload_name}".removesuffix("."))
        shares = first is not None and not first.is_write and any(r.alias_info for r in schema.returns)
        if schema.name.startswith("aten::") and known and shares:
            annotated.add(f"aten.{schema.name[6:]}.{schema.overload_name or 'default'}")
    internal = {  # to autograd, sparse and nested tensors
        f"aten.{name}.default"
        for name in (
            "_autocast_to_full_precision _autocast_to_reduced_precision _fw_primal _indices _make_dual "
            "_nested_get_values _nested_view_from_buffer _nested_view_from_jagged _sparse_broadcast_to "
            "_test_autograd_multiple_dispatch_view _unpack_dual _values ccol_indices coalesce col_indices crow_indices "
            "indices pin_memory row_indices slice_inverse values"
        ).split()
    }
    without_annotation = {
        *(f"aten.{n}dropout.default" for n in ("", "feature_", "alpha_", "feature_alpha_")),
        *(f"aten.atleast_{n}d.{overload}" for n in (1, 2, 3) for overload in ("default", "Sequence")),
        *("aten.broadcast_tensors.default", "aten.meshgrid.default", "aten.meshgrid.indexing"),
        *("aten.einsum.default", "aten.lift.default", "aten.type_as.default"),
    }
    declared = {name for name, result in DECLARED.items() if result.may_share}
    assert declared - without_annotation == annotated - internal
    assert without_annotation <= declared


def test_updates_are_new_tensors() -> None:
    updates = {name for name, result in DECLARED.items() if result is Result.UPDATE}
    assert {"aten.index_copy.default", "aten.slice_scatter.default", "aten.masked_scatter.default"} <= updates
