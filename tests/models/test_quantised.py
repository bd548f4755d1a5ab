"""Quantised PyTorch models compile completely and have PyTorch's results."""

from __future__ import annotations

import pytest
import torch

import npu_compiler
from npu_compiler.frontend import state_dict_numpy
from npu_runtime import Executor

from ..support.quantised import QuantisedNet


@pytest.mark.parametrize("signed", [False, True])
def test_graph_of_pt2e_is_native(signed: bool) -> None:
    torch.manual_seed(0)
    model, x = QuantisedNet(signed).eval(), torch.randn(2, 3, 16, 16)
    ir = npu_compiler.capture(model, (x,))
    assert not npu_compiler.check(ir)
    got = Executor(npu_compiler.compile(ir), state_dict_numpy(model)).run([x.numpy()])
    with torch.no_grad():
        want = model(x)
    # A value next to the middle of two integers may be rounded to either, which moves the results a little.
    torch.testing.assert_close(torch.from_numpy(next(iter(got.values()))), want, rtol=0, atol=0.01)
