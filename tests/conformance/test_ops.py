"""Every op overload x sample x dtype, on every target, against PyTorch eager and float64.

A test is a target and an overload, such as ``interp-aten.add.Tensor``: select with ``-k "interp and aten.add"``. (One
for each of the 25,000 cases would take pytest longer than the cases do.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from npu_compiler.ops import REGISTRY

from .cases import MARKS, PROGRAM, TARGETS, Batch, Case, all_cases, cases_for, check, compile_cases, overload_of
from .nonfinite import test_one_element_changes_what_sees_it

__all__ = ["test_one_element_changes_what_sees_it"]

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


def _by_overload(target: str) -> dict[str, list[Case]]:
    cases: dict[str, list[Case]] = {}
    for case in cases_for(target):
        cases.setdefault(case.op_type, []).append(case)
    return cases


CASES = {target: _by_overload(target) for target in TARGETS}
PARAMETERS = [pytest.param(t, op, id=f"{t}-{op}", marks=MARKS.get(t, ())) for t, ops in CASES.items() for op in ops]


@pytest.mark.parametrize(("target", "op_type"), PARAMETERS)
def test_op(target: str, op_type: str, request: pytest.FixtureRequest) -> None:
    """All cases of an overload; the message names every one that fails, with its sample."""
    cases = CASES[target][op_type]
    if (target, cases[0]) not in _outcomes:  # the first of its family: run all selected ones together
        selected = [
            item.callspec.params for item in request.session.items if getattr(item, "originalname", "") == "test_op"
        ]
        ops = [p["op_type"] for p in selected if p["target"] == target]
        family = REGISTRY[op_type].family
        run(target, [case for op in ops if REGISTRY[op].family == family for case in CASES[target][op]])
    messages = [m for case in cases if (m := failure(case, _outcomes[target, case]))]
    assert not messages, f"{len(messages)} of {len(cases)} cases failed\n" + "\n".join(messages)


def failure(case: Case, outcome: tuple[list[np.ndarray], bool] | Exception) -> str:
    """What is wrong with a case; empty if nothing is."""
    if isinstance(outcome, Exception):
        return f"{case} {case.sample}: {type(outcome).__name__}: {outcome}"
    try:
        check(case, *outcome)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("op_type", sorted(REGISTRY))
def test_overload_is_well_declared(op_type: str) -> None:
    """At least three samples, and parameters that are the ATen schema's, in its order and with its defaults."""
    op = REGISTRY[op_type]
    assert len(op.samples) >= 3, f"{op_type} has {len(op.samples)} samples"
    schema = {a.name: a for a in overload_of(op_type)._schema.arguments}
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
    outcomes = {case: [np.asarray(results[n]) for n in names] for case, names in batch.outputs.items()}
    assert failure(good, (outcomes[good], batch.summing[good])) == ""
    wrong = [r + np.asarray(0.1, r.dtype) for r in outcomes[bad]]
    assert re.match(r"aten.relu.default-0-.*error", failure(bad, (wrong, batch.summing[bad])))
    assert re.match(r"aten.relu.default-0-.*ValueError: no", failure(bad, ValueError("no")))
