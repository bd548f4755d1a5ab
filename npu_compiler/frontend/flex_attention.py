"""torch's flex_attention as a graph of ordinary ops."""

from __future__ import annotations

from typing import Any

import torch
from torch._higher_order_ops.flex_attention import math_attention
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["flex_attention_graph"]


def flex_attention_graph(node: torch.fx.Node) -> tuple[torch.fx.GraphModule, list[torch.fx.Node]]:
    """Return the graph of an exported ``flex_attention`` node, and the nodes whose values its placeholders take.

    The graph is torch's own definition of the result: all scores, modified and masked, and their softmax. The block
    mask only saves work in torch; its ``mask_mod`` is applied.
    """
    operands: list[torch.fx.Node] = []
    graphs: dict[torch.fx.Node, Any] = {}
    for n in node.all_input_nodes:
        if n.op == "get_attr":
            graphs[n] = getattr(node.graph.owning_module, str(n.target))
        else:
            operands.append(n)

    def attention(*tensors: torch.Tensor) -> Any:
        values = {**graphs, **dict(zip(operands, tensors, strict=True))}
        arguments: Any = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        return math_attention(*arguments[0], **arguments[1])

    return make_fx(attention)(*(n.meta["val"] for n in operands)), operands
