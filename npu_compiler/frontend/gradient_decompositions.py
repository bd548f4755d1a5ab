"""Decompositions that PyTorch lacks of the gradients of convolutions and average pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["GRADIENT_DECOMPOSITIONS"]

_convolution = torch.ops.aten.convolution.default


def convolution_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """Return the gradients of the input and the bias; None for that of the weight. The first one is a convolution of
    ``grad_output`` with the same weight, transposed if the forward one was not."""
    rank = weight.dim() - 2
    if grad_output.dim() != rank + 2:
        return NotImplemented
    stride, padding, dilation = (list(v) * (rank // len(v)) for v in (stride, padding, dilation))
    rest = [0] * rank
    if not transposed:
        taps = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        rest = _rest(input.shape[2:], grad_output.shape[2:], taps, stride, padding)
    to_input = _convolution(grad_output, weight, None, stride, padding, dilation, not transposed, rest, groups)
    to_bias = grad_output.sum([0, *range(2, rank + 2)]) if output_mask[2] else None
    return to_input, None, to_bias


def avg_pool2d_backward(
    grad_output: torch.Tensor,
    self: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    """Return the gradient of the input: every element of ``grad_output`` is spread over its window. Windows that count
    different numbers of elements are not decomposed."""
    kernel, padding = (list(v) * (2 // len(v)) for v in (kernel_size, padding))
    stride = list(stride or kernel) * (2 // len(stride or kernel))
    uniform = not ceil_mode and (count_include_pad or not any(padding) or divisor_override is not None)
    if self.dim() != 4 or not uniform:
        return NotImplemented
    channels = self.shape[1]
    part = 1 / (divisor_override or kernel[0] * kernel[1])
    window = grad_output.new_full((channels, 1, *kernel), part)
    rest = _rest(self.shape[2:], grad_output.shape[2:], kernel, stride, padding)
    return _convolution(grad_output, window, None, stride, padding, [1, 1], True, rest, channels)


def _rest(
    wanted: Sequence[int], given: Sequence[int], taps: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> list[int]:
    """Return the elements at the end of each dim that no window of the forward operation reached."""
    reached = [(n - 1) * s - 2 * p + t for n, s, p, t in zip(given, stride, padding, taps, strict=True)]
    return [w - r for w, r in zip(wanted, reached, strict=True)]


GRADIENT_DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten.avg_pool2d_backward.default": avg_pool2d_backward,
    "aten.convolution_backward.default": convolution_backward,
}
"""By op, as ``OWN_DECOMPOSITIONS``."""
