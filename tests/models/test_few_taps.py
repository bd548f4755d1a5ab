"""Convolutions of few taps: their sums are as accurate as chains of additions that end after 16 channels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from npu_compiler.frontend import capture, state_dict_numpy

from .gate import SCALE, compile_whole, rms, run

CHANNELS = 16  # of a chain


def chained(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The convolution of float32 x [N, C, L] and w [K, C, taps], every addition of a chain rounded once."""
    taps = w.shape[2]
    length = x.shape[2] - taps + 1
    total = np.zeros((x.shape[0], w.shape[0], length), np.float32)
    for first in range(0, x.shape[1], CHANNELS):
        chain = np.zeros(total.shape, np.float64)
        for t in range(taps):
            for c in range(first, first + CHANNELS):
                product = x[:, None, c, t : t + length].astype(np.float64) * w[None, :, c, t, None]
                chain = (chain + product).astype(np.float32).astype(np.float64)
        total += chain.astype(np.float32)
    return total


@pytest.mark.parametrize("taps", [2, 3, 4, 5])
def test_sums_have_short_chains(taps: int) -> None:
    torch.manual_seed(taps)
    conv, x = nn.Conv1d(64, 32, taps, bias=False), torch.randn(2, 64, 200)
    (result,) = run(compile_whole(capture(conv, (x,))), state_dict_numpy(conv), [(x,)])
    with torch.no_grad():
        exact = conv.double()(x.double()).numpy()
    short = chained(x.numpy(), conv.weight.detach().float().numpy())
    assert rms(result.astype(np.float64) - exact) <= SCALE * rms(short.astype(np.float64) - exact)
