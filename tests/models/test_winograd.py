"""float32 convolutions by Winograd's algorithm are as accurate as PyTorch's direct ones."""

from __future__ import annotations

import torch

from .gate import check_sums


def test_sums_of_many_channels() -> None:
    """Inputs of one sign: sums grow, and with them the errors of late additions."""
    torch.manual_seed(0)
    conv, x = torch.nn.Conv2d(1024, 64, 3, padding=1, bias=False), torch.randn(1, 1024, 14, 14).relu()
    check_sums(conv, x)
