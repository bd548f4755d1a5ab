"""Lists of tensors with None in the attributes of nodes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import npusim
from npu_compiler.aten.tensor_lists import MASKS, SIZES, TensorLists, complete_masks, list_attrs


def test_every_list_has_a_mask_if_one_has_none() -> None:
    attrs = list_attrs([["a", "b"], [None, "c", None]])
    assert attrs == {SIZES: [2, 1], MASKS: [[False, False], [True, False, True]]}
    lists = TensorLists(attrs)
    assert [lists.take(9), lists.take(9), lists.take(9)] == [*attrs[MASKS], [False] * 9]
    assert list_attrs([["a"]]) == {SIZES: [1]} and list_attrs([]) == {}


@pytest.mark.parametrize(
    ("sizes", "masks", "expected"),
    [
        ([2, 1], [[True, False]], [[False, False], [True, False]]),
        ([1], [[True, False]], [[True, False]]),
        ([1, 1], [[True, False], [False]], [[True, False], [False]]),
        ([3, 0], [[True]], [[False, False, False], [True]]),
        ([2], [[False, False]], []),
        ([2], [], []),
    ],
)
def test_masks_belong_to_lists_with_as_many_tensors(
    sizes: list[int], masks: list[list[bool]], expected: list[list[bool]]
) -> None:
    assert complete_masks(sizes, masks) == expected


@pytest.mark.parametrize(
    ("sizes", "masks", "message"),
    [
        ([1, 1], [[True, False]], "several lists"),
        ([2, 2], [[True, False]], "no list"),
        ([1], [[True, False], [True, False]], "no list"),
        ([1] * 60, [[True, False]] * 30, "several lists"),  # no search over all combinations
    ],
)
def test_masks_that_do_not_tell_their_lists_are_an_error(
    sizes: list[int], masks: list[list[bool]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        complete_masks(sizes, masks)


@torch.library.custom_op("npusim_test::weighted_lists", mutates_args=())
def weighted_lists(a: list[torch.Tensor], b: list[torch.Tensor | None]) -> torch.Tensor:
    """A sum in which every place of both lists has another weight."""
    every = [*a, *b]
    return torch.stack([x * 10.0**i for i, x in enumerate(every) if x is not None]).sum(0)


@weighted_lists.register_fake
def _(a: list[torch.Tensor], b: list[torch.Tensor | None]) -> torch.Tensor:
    return torch.empty_like(a[0])


def test_a_model_with_two_lists_has_pytorchs_result() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            first = torch.ops.npusim_test.weighted_lists([x, y], [None, y + 1, None, x])
            return first + torch.ops.npusim_test.weighted_lists([x], [y, None])

    x, y = torch.full((3,), 2.0), torch.full((3,), 5.0)
    model = Model().eval()
    assert torch.equal(npusim.build(model, (x, y), "cpu")(x, y), model(x, y))
