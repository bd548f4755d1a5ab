"""float32 convolutions by Winograd's algorithm are as accurate as PyTorch's direct ones."""

from __future__ import annotations

import numpy as np
import torch

import npu_compiler
from npu_compiler.frontend import state_dict_numpy
from npu_runtime import Executor

from .gate import SCALE, rms


def test_sums_of_many_channels() -> None:
    """Inputs of one sign: sums grow, and with them the errors of late additions."""
    torch.manual_seed(0)
    conv, x = torch.nn.Conv2d(1024, 64, 3, padding=1, bias=False), torch.randn(1, 1024, 14, 14).relu()
    run = Executor(npu_compiler.compile(npu_compiler.capture(conv, (x,))), state_dict_numpy(conv))
    (result,) = run.run([x.numpy()]).values()
    with torch.no_grad():
        eager = conv(x).numpy()
        exact = conv.double()(x.double()).numpy()
    assert rms(result.astype(np.float64) - exact) <= SCALE * rms(eager.astype(np.float64) - exact)
