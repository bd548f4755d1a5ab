"""Ops without a lowering become native where PyTorch's decompositions lead to ops that have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import npu_compiler
from npu_compiler.aten.json_reader import load_ir_from_dict
from npu_compiler.aten.json_writer import ir_to_dict
from npu_compiler.partitioning.partitioner import partition
from npu_compiler.partitioning.plan import HOST, NPU, PartitionPlan
from npu_compiler.support.errors import InputError
from npu_runtime import DAGExecutor

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402 - imports torch
from torch.nn import functional as F  # noqa: E402

from npu_compiler.frontend import capture, decompose, own_decompositions, state_dict_numpy  # noqa: E402


class Fn(nn.Module):
    def __init__(self, function: Callable[..., Any], **parts: Any):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def normal(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make().eval()


def check(model: nn.Module, *args: Any, tolerance: float = 2e-6) -> PartitionPlan:
    """The plan, once its results are those of the model, rounding excepted."""
    weights = {k: v.copy() for k, v in state_dict_numpy(model).items()}
    plan = partition(load_ir_from_dict(ir_to_dict(capture(model, args))))
    found = DAGExecutor(plan, weights=weights).execute(list(args)).values()
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(model(*args))
    for value, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, want.numpy(), rtol=tolerance, atol=tolerance)
    return plan


IDS = torch.tensor([1, 2, 8, 0, 2, 2, 5, 3, 3, 7, 1, 4])
STARTS, ENDS = (
    torch.tensor([0, 4, 4, 6, 11]),
    torch.tensor([0, 4, 4, 6, 12]),
)  # with an empty bag and, of 2s, a padded one

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "LSTM": (lambda: nn.LSTM(3, 4, 2, batch_first=True), (normal(2, 3, 3),)),
    "LSTM, both directions": (lambda: nn.LSTM(3, 4, bidirectional=True), (normal(3, 1, 3),)),
    "LSTM, projected": (lambda: nn.LSTM(3, 4, proj_size=2), (normal(3, 2, 3),)),
    "GRU": (lambda: nn.GRU(3, 4), (normal(3, 2, 3),)),
    "RNN": (lambda: nn.RNN(3, 4, nonlinearity="relu"), (normal(3, 2, 3),)),
    "GRUCell": (lambda: nn.GRUCell(3, 4), (normal(2, 3), normal(2, 4))),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 3)), (normal(1, 3, 6),)),
    "losses": (
        lambda: Fn(lambda m, x, y: (F.huber_loss(x, y), F.cross_entropy(x, y.softmax(-1)), F.soft_margin_loss(x, y))),
        (normal(3, 5), normal(3, 5).sign()),
    ),
    "bicubic grid": (
        lambda: Fn(lambda m, x, g: F.grid_sample(x, g, mode="bicubic", align_corners=False)),
        (normal(1, 2, 4, 4), normal(1, 3, 3, 2).tanh()),
    ),
    "fold": (lambda: nn.Fold((4, 5), (2, 2)), (normal(1, 12, 12),)),
    "unpool": (
        lambda: Fn(lambda m, x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
        (normal(1, 2, 4, 4),),
    ),
    "kron": (lambda: Fn(lambda m, x: torch.kron(x, x)), (normal(2, 3),)),
    "diag_embed": (lambda: Fn(lambda m, x: torch.diag_embed(x, 1)), (normal(2, 3),)),
    "quantile": (lambda: Fn(lambda m, x: torch.quantile(x, 0.3, dim=-1)), (normal(2, 5),)),
    "bucketize": (lambda: Fn(lambda m, x: torch.bucketize(x, torch.arange(-2.0, 3.0))), (normal(9),)),
    "bilinear": (lambda: nn.Bilinear(3, 4, 5), (normal(2, 2, 3), normal(2, 2, 4))),
    **{
        f"distances, p={p}": (
            lambda p=p: Fn(lambda m, x, y: torch.cdist(x, y, p)),
            (normal(5, 3), normal(2, 4, 3)),
        )
        for p in (0.0, 1.0, 2.0, 2.5, float("inf"))
    },
    "many distances": (lambda: Fn(lambda m, x: torch.cdist(x, x + 1)), (normal(30, 3),)),
    "bags of one size": (lambda: nn.EmbeddingBag(9, 4, mode="mean"), (IDS.reshape(3, 4),)),
    "sums of bags, an empty one": (lambda: nn.EmbeddingBag(9, 4, mode="sum", padding_idx=2), (IDS, STARTS)),
    "means of bags": (lambda: nn.EmbeddingBag(9, 4, padding_idx=2), (IDS, STARTS)),
    "maxima of bags": (lambda: nn.EmbeddingBag(9, 4, mode="max", padding_idx=2), (IDS, STARTS)),
    "bags with an end": (lambda: nn.EmbeddingBag(9, 4, mode="max", include_last_offset=True), (IDS.int(), ENDS.int())),
    "weighted bags": (
        lambda: Fn(lambda m, i, o, w: m.bag(i, o, per_sample_weights=w), bag=nn.EmbeddingBag(9, 4, mode="sum")),
        (IDS, STARTS, normal(12)),
    ),
    "in a no_grad region": (lambda: Fn(torch.no_grad()(lambda m, x: torch.kron(x, x) + 1)), (normal(2, 3),)),
}


@pytest.mark.parametrize("name", CASES)
def test_one_native_partition(name: str) -> None:
    make, args = CASES[name]
    plan = check(seeded(make), *args)
    assert [p.device for p in plan.partitions] == [NPU], plan.describe()


def test_what_depends_on_weights_alone_costs_nothing_per_run() -> None:
    """Weight norm, and NFNet's batch norm of a weight without running statistics, are load-time recipes."""

    def standardised(m: Any, x: Any) -> Any:
        w = F.batch_norm(m.conv.weight.reshape(1, 4, -1), None, None, training=True, momentum=0.0).reshape(4, 2, 3, 3)
        return F.conv2d(x, w, m.conv.bias)

    model = seeded(lambda: Fn(standardised, conv=nn.Conv2d(2, 4, 3)))
    plain = npu_compiler.compile(capture(seeded(lambda: nn.Conv2d(2, 4, 3)), (normal(1, 2, 5, 5),)))
    assert [p.device for p in check(model, normal(1, 2, 5, 5)).partitions] == [NPU]
    program = npu_compiler.compile(capture(model, (normal(1, 2, 5, 5),)))
    assert len(program.entries["main"].calls) == len(plain.entries["main"].calls)
    linear = seeded(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    program = npu_compiler.compile(capture(linear, (normal(2, 4),)))
    assert len(program.entries["main"].calls) == 1


def test_an_op_stays_whole_if_only_a_part_would_be_native() -> None:
    plan = check(Fn(lambda m, x: (torch.linalg.cholesky(x @ x.mT) + 1).relu()).eval(), normal(3, 4))
    reason = plan.reasons["linalg_cholesky"]
    assert reason.rule == "no_kernel" and "aten.linalg_cholesky_ex.default" in reason.detail
    assert not any("cholesky_ex" in n.op_type for n in plan.ir.nodes)


def test_an_op_stays_whole_if_its_decomposition_lacks_a_used_result() -> None:
    model = Fn(lambda m, i, o: m.bag(i, o), bag=nn.EmbeddingBag(9, 4)).eval()
    model.function = lambda m, i, o: torch.embedding_bag(m.bag.weight, i, o, mode=1)[:3:2]
    plan = check(model, IDS, STARTS)
    assert "lacks a result" in plan.reasons["embedding_bag"].detail


def test_long_loops_are_not_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(lambda: nn.GRU(3, 4))
    assert [p.device for p in check(model, normal(9, 1, 3)).partitions] == [NPU]
    monkeypatch.setattr(decompose, "MAX_OPS", 100)
    plan = check(model, normal(9, 1, 3))
    assert [p.device for p in plan.partitions] == [HOST]
    assert "more than 100 ops" in plan.reasons["gru"].detail
    assert [p.device for p in check(model, normal(2, 1, 3)).partitions] == [NPU]


def test_native_ops_stay_whole() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)))
    ops = [n.op_type for n in capture(model, (normal(2, 4),)).nodes]
    assert ops == ["aten.linear.default", "aten.gelu.default", "aten.layer_norm.default"]


def test_in_place_writes_to_results_are_seen_by_all_that_share_them() -> None:
    def forward(m: Any, x: Any) -> Any:
        y = torch.kron(x, x)
        y.view(-1)[:3].mul_(10)
        z = torch.diag_embed(x)
        row = z[0]
        row.add_(1)
        return y + 1, z, row

    check(Fn(forward).eval(), normal(2, 3))


def test_buffers_that_ops_write_are_state() -> None:
    def forward(m: Any, x: Any) -> Any:
        m.total.add_(torch.kron(x, x))
        return m.total * 2

    model = Fn(forward, total=torch.zeros(4, 4)).eval()
    ir = capture(model, (normal(2, 2),))
    assert [u.key for u in ir.state] == ["total"]
    executor = DAGExecutor(partition(ir), weights={"total": np.zeros((4, 4), np.float32)})
    first, second = (next(iter(executor.execute([normal(2, 2)]).values())) for _ in range(2))
    np.testing.assert_allclose(second, 2 * first, rtol=1e-6)


def test_an_exported_program_is_left_as_it_was() -> None:
    program = torch.export.export(Fn(lambda m, x: torch.kron(x, x)).eval(), (normal(2, 3),))
    before = str(program.graph)
    ir = capture(program)
    assert str(program.graph) == before and not [n for n in ir.nodes if "kron" in n.op_type]


def test_half_precision_is_as_exact_as_eager() -> None:
    model = seeded(lambda: nn.GRU(4, 8))
    x = normal(6, 2, 4)
    with torch.no_grad():
        exact = model.double()(x.double())[0].numpy()
        eager = model.bfloat16()(x.bfloat16())[0].double().numpy()
    executor = DAGExecutor(partition(capture(model, (x.bfloat16(),))), weights=state_dict_numpy(model))
    found = next(iter(executor.execute([x.bfloat16()]).values())).astype(np.float64)
    assert np.sqrt(np.mean((found - exact) ** 2)) <= 1.1 * np.sqrt(np.mean((eager - exact) ** 2))


def test_mixture_of_experts_is_one_native_partition() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**sizes, **heads, use_cache=False)
    model = seeded(lambda: transformers.MixtralForCausalLM(config))
    plan = check(Fn(lambda m, ids: m.model(input_ids=ids).logits, model=model).eval(), torch.arange(7)[None])
    assert [p.device for p in plan.partitions] == [NPU], plan.describe()


def test_large_groups_of_rows_stay_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    model = Fn(lambda m, x, w: torch.ops.aten._grouped_mm(x, w, offs=m.offs), offs=offs).eval()
    x, w = normal(6, 16).bfloat16(), normal(3, 16, 16).bfloat16()
    ops = [n.op_type for n in capture(model, (x, w)).nodes]
    assert "aten._grouped_mm.default" not in ops and "aten.bmm.default" in ops
    monkeypatch.setattr(own_decompositions, "MAX_GATHERED", 6 * 16 * 16 - 1)
    plan = partition(capture(model, (x, w)))
    assert "runs best as it is" in next(iter(plan.reasons.values())).detail


def test_grouped_products_and_histograms_are_those_of_pytorch() -> None:
    x, w, offs = normal(6, 3), normal(4, 3, 5), torch.tensor([2, 2, 5, 5])
    expected = torch.cat([x[:2] @ w[0], x[2:5] @ w[2], torch.zeros(1, 5)])
    torch.testing.assert_close(own_decompositions.grouped_mm(x, w, offs), expected)
    for values in (normal(99) * 3, torch.arange(-2.0, 9.0), torch.tensor([float("nan"), 0.0, 3.0, 3.1])):
        for bins, low, high in ((4, 0, 3), (7, -1, 5), (1, 0, 1)):
            found = own_decompositions.histc(values, bins, low, high)
            assert torch.equal(found, torch.histc(values, bins, low, high))
    assert own_decompositions.histc(values, 4) is NotImplemented  # the bounds are those of the data


@pytest.mark.parametrize(
    ("mask", "source"),
    [((2, 6, 8), (100,)), ((2, 6, 1), (12, 8)), ((2, 6, 1), (101,)), ((3, 2, 6, 8), (300,))],
    ids=["elements", "rows", "no whole rows", "more dims"],
)
def test_masked_scatter(mask: tuple[int, ...], source: tuple[int, ...]) -> None:
    """Elements one by one, and rows if the mask is one along the last dim."""
    torch.manual_seed(0)
    args = torch.randn(2, 6, 8), torch.rand(mask) > 0.5, torch.randn(source)
    model = Fn(lambda _, x, m, y: x.masked_scatter(m, y))
    plan = partition(capture(model, args))
    assert [part.device for part in plan.partitions] == [NPU]
    (found,) = DAGExecutor(plan, weights={}).execute(list(args)).values()
    assert torch.equal(torch.as_tensor(np.asarray(found)), model(*args))


def test_an_expanded_mask_moves_rows() -> None:
    x, rows = torch.randn(2, 6, 8), torch.rand(2, 6) > 0.5
    wide = rows[:, :, None].expand_as(x)
    assert torch.equal(own_decompositions.masked_scatter(x, wide, x), x.masked_scatter(wide, x))
    ir = capture(Fn(lambda _, x, m, y: x.masked_scatter(m[:, :, None].expand_as(x), y)), (x, rows, x))
    (sums,) = (n for n in ir.nodes if n.op_type.startswith("aten.cumsum"))
    assert sums.inputs[0].shape == (12,)


def test_a_source_of_masked_scatter_that_is_too_short_is_an_error() -> None:
    args = torch.randn(2, 6, 8), torch.zeros(2, 6, 1, dtype=torch.bool), torch.randn(3, 8)
    plan = partition(capture(Fn(lambda _, x, m, y: x.masked_scatter(m, y)), args))
    executor = DAGExecutor(plan, weights={})
    executor.execute(list(args))
    with pytest.raises(InputError, match="out of range"):
        executor.execute([args[0], ~args[1], args[2]])
