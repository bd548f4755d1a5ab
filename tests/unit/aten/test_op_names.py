"""Functional variants of in-place ops, against PyTorch's schemas and results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import npusim
from npu_compiler.aten.op_names import functional_name

from ...support.captured import Fn

Schema = Any


def _types(schema: Schema) -> list[str]:
    return sorted(str(a.type) for a in schema.arguments)


def test_functional_variants_take_the_arguments_of_the_in_place_ops() -> None:
    schemas: dict[str, dict[str, Schema]] = defaultdict(dict)
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::"):
            schemas[schema.name.removeprefix("aten::")][schema.overload_name or "default"] = schema
    checked = 0
    for name, overloads in schemas.items():
        for overload, schema in overloads.items():
            first = schema.arguments[0] if schema.arguments else None
            if first is None or str(first.type) != "Tensor" or not name.endswith("_"):
                continue
            if first.alias_info is None or not first.alias_info.is_write:
                continue
            _, base, found = functional_name(f"aten.{name}.{overload}").split(".")
            variants = schemas.get(base, {})
            if any(_types(v) == _types(schema) for v in variants.values()):
                assert _types(variants[found]) == _types(schema), f"aten.{name}.{overload}"
                checked += 1
    assert checked > 200


OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pow_scalar": lambda x: (x + 1).pow_(-0.5),
    "pow_tensor": lambda x: (x + 1).pow_(x),
    "float_power_scalar": lambda x: (x.double() + 1).float_power_(1.5),
    "float_power_tensor": lambda x: (x.double() + 1).float_power_(x),
    "floor_divide": lambda x: (x * 5).floor_divide_(x + 1),
    "ldexp": lambda x: (x + 1).ldexp_(torch.arange(4)),
    "transpose": lambda x: (x + 1).transpose_(0, 1),
    "renorm": lambda x: (x + 1).renorm_(2, 0, 1.0),  # this and the next have no lowering of their own
    "into_a_view": lambda x: (y := x + 1, y[1].sinc_(), y)[2],
    "seen_by_a_view": lambda x: (y := x + 1, v := y[:, 1:], y.sinc_(), v)[3],
}


@pytest.mark.parametrize("op", OPS)
def test_in_place_ops_are_native(op: str) -> None:
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    built = npusim.build(Fn(lambda m, x: OPS[op](x)), x, fallback=False)
    torch.testing.assert_close(built(x), OPS[op](x), rtol=1e-6, atol=1e-6)
