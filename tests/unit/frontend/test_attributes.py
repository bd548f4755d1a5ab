"""Plain Python attributes of a module during a capture: containers of any class are left as they were."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from npu_compiler.frontend import capture

X = torch.arange(4.0)


class Frozen(OrderedDict[str, Any]):
    """A configuration that refuses every write, like those of diffusers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.is_frozen = True

    def __setitem__(self, key: str, value: Any) -> None:
        if getattr(self, "is_frozen", False):
            raise TypeError("this dict is frozen")
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("this dict is frozen")

    def copy(self) -> Any:
        raise TypeError("this dict is not copied")


class FrozenList(list[Any]):
    """A list that refuses writes."""

    def __setitem__(self, *args: Any) -> None:
        raise TypeError("this list is frozen")


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Frozen(scale=3.0, nested=FrozenList([1, 2]))
        self.seen: dict[str, int] = {"calls": 0, "kept": 1}
        self.shapes: list[Any] = ["first"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["calls"] += 1
        self.seen["new"] = 1
        self.seen.pop("kept", None)
        self.shapes.append(x.shape)
        return x * self.config["scale"]


def test_containers_are_as_before_and_frozen_ones_are_not_written() -> None:
    model = Configured()
    before = model.config, model.seen, model.shapes
    graph = capture(model, (X,))
    assert [n.op_type for n in graph.nodes] == ["aten.mul.Tensor"]
    assert (model.config, model.seen, model.shapes) == before
    assert all(now is then for now, then in zip((model.config, model.seen, model.shapes), before, strict=True))
    assert model.seen == {"calls": 0, "kept": 1} and model.shapes == ["first"]
    assert model.config == {"scale": 3.0, "nested": [1, 2]}
