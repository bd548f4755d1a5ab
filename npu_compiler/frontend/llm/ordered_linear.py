"""Linear layers whose weights have their columns in another order than the input, for quantised checkpoints.

GPTQ can quantise columns in the order of the activations' size (``desc_act``); columns that share a scale then lie
apart. In their order, groups are runs again, which weight formats hold.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["OrderedLinear", "use_column_orders"]


class OrderedLinear(nn.Linear):
    """A linear layer of which column i of the weight belongs to element ``order[i]`` of the input.

    Args:
        linear: the layer that it takes the place of.
        owner: the layer whose ``order``, int64[in_features], it uses; None: its own.
    """

    def __init__(self, linear: nn.Linear, owner: OrderedLinear | None = None):
        weight = linear.weight
        size = linear.in_features, linear.out_features
        super().__init__(*size, linear.bias is not None, device=weight.device, dtype=weight.dtype)
        self._owner = (self if owner is None else owner,)  # in a tuple, lest it becomes a submodule
        if owner is None:
            self.register_buffer("order", torch.zeros(linear.in_features, dtype=torch.int64, device=weight.device))

    def forward(self, input: Tensor) -> Tensor:
        order = self._owner[0].order
        assert isinstance(order, Tensor)
        return super().forward(input.index_select(-1, order))


def use_column_orders(decoder: nn.Module, orders: Iterable[tuple[str, str]]) -> None:
    """Replace linear layers by ordered ones. ``orders``: (layer, the layer whose order it uses), owners first."""
    for name, owner in orders:
        linear, found = decoder.get_submodule(name), decoder.get_submodule(owner)
        assert isinstance(linear, nn.Linear)
        if name == owner:
            made = OrderedLinear(linear)
        else:
            assert isinstance(found, OrderedLinear)
            made = OrderedLinear(linear, found)
        decoder.set_submodule(name, made)
