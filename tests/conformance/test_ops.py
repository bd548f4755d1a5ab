"""Every op overload x sample x dtype, on every target, against PyTorch eager and float64.

Ids read ``interp-aten.add.Tensor-2-float16``: select with ``-k "interp and aten.add"``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from npu_compiler.ops import REGISTRY

from .cases import MARKS, PROGRAM, TARGETS, Batch, Case, all_cases, cases_for, check, compile_cases

# Results and Batch.summing of a case, or the error that it ended in.
_outcomes: dict[tuple[str, Case], tuple[list[np.ndarray], bool] | Exception] = {}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: PyTorch's thread pool would only cost time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(target: str, cases: list[Case]) -> None:
    """Run the cases in programs of up to PROGRAM; if one fails as a whole, one by one, so that each reports its own
    error."""
    if len(cases) > PROGRAM:
        for at in range(0, len(cases), PROGRAM):
            run(target, cases[at : at + PROGRAM])
        return
    batch = compile_cases(cases)
    _outcomes.update({(target, case): error for case, error in batch.failed.items()})
    try:
        results = TARGETS[target](batch.graph, batch.inputs) if batch.outputs else {}
    except Exception as error:
        if len(batch.outputs) <= 1:
            _outcomes.update({(target, case): error for case in batch.outputs})
        else:
            for case in batch.outputs:
                run(target, [case])
        return
    for case, names in batch.outputs.items():
        _outcomes[target, case] = ([np.asarray(results[n]) for n in names], batch.summing[case])


PARAMETERS = [pytest.param(t, c, id=f"{t}-{c}", marks=MARKS.get(t, ())) for t in TARGETS for c in cases_for(t)]


@pytest.mark.parametrize(("target", "case"), PARAMETERS)
def test_op(target: str, case: Case, request: pytest.FixtureRequest) -> None:
    if (target, case) not in _outcomes:  # the first of its family: run all selected ones together
        selected = [
            item.callspec.params for item in request.session.items if getattr(item, "originalname", "") == "test_op"
        ]
        run(target, [p["case"] for p in selected if p["target"] == target and p["case"].family == case.family])
    outcome = _outcomes[target, case]
    if isinstance(outcome, Exception):
        raise AssertionError(f"{case} {case.sample}: {type(outcome).__name__}: {outcome}") from outcome
    check(case, *outcome)


@pytest.mark.parametrize("op_type", sorted(REGISTRY))
def test_overload_is_well_declared(op_type: str) -> None:
    """At least three samples, and parameters that are the ATen schema's, in its order and with its defaults."""
    op = REGISTRY[op_type]
    assert len(op.samples) >= 3, f"{op_type} has {len(op.samples)} samples"
    _, name, overload = op_type.split(".")
    schema = {a.name: a for a in getattr(getattr(torch.ops.aten, name), overload)._schema.arguments}
    names = [p.name for p in op.params if p.name in schema]
    assert names == [n for n in schema if n in names], f"{op_type}: parameters are not in schema order"
    for p in op.params:
        if p.name in schema and schema[p.name].has_default_value():
            want = schema[p.name].default_value
            allowed = [want, *want] if isinstance(want, list) else [want]
            assert plain(p.default) in allowed, f"{op_type}: {p.name}={p.default!r}, in ATen {want!r}"


def plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def test_failing_case_is_reported_alone() -> None:
    """A case with a wrong lowering fails with the op, sample and error; its neighbours do not."""
    good, bad = [c for c in all_cases() if c.op_type == "aten.relu.default"][:2]
    batch: Batch = compile_cases([good, bad])
    results = TARGETS["interp"](batch.graph, batch.inputs)
    check(good, [results[n] for n in batch.outputs[good]], batch.summing[good])
    with pytest.raises(AssertionError, match=r"aten.relu.default-0-.*error"):
        check(bad, [results[n] + np.asarray(0.1, results[n].dtype) for n in batch.outputs[bad]], batch.summing[bad])
