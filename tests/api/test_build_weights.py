"""Names of weights that a caller passes: formats by name, state_dicts, and the first contents of buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import npu_compiler  # noqa: E402
import npu_runtime  # noqa: E402
import npusim  # noqa: E402
from npu_compiler.support.errors import ArtifactError, ConfigError, WeightError  # noqa: E402


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.unused = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(3, 3)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


class OnBoth(nn.Module):
    """Two products with an op of the host between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.linalg.svdvals(self.up(x).unflatten(-1, (8, 8))))


class Running(nn.Module):
    """A mean that the state_dict has and a count that it lacks; neither starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.full((4,), 5.0))
        self.register_buffer("count", torch.full((4,), 7.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.count += 1
        return self.linear(x) - self.mean + self.count


IDS, ROWS = torch.zeros(2, 5, dtype=torch.long), torch.randn(2, 64)
NAMES = [
    (Tied, IDS, {"embed.weigth": "q8_0"}, r"'Tied' has no weight 'embed.weigth'; did you mean 'embed.weight'\?"),
    (Tied, IDS, {"x": "q8_0", "*": "bf16c12"}, r"'Tied' has no weight 'x'; its formats may name '\*' for all others"),
    (Tied, IDS, {"head.weight": "q8_0"}, "does not read 'head.weight'; give the format to the first key of tied"),
    (OnBoth, ROWS, {"dwn.weight": "q8_0"}, "'OnBoth' has no weight 'dwn.weight'; did you mean 'down.weight'"),
    (OnBoth, ROWS, {"up.weight": torch.ones(1)}, r"weights\['up.weight'\] is a Tensor, not the name of a format"),
]


@pytest.mark.parametrize(("kind", "x", "formats", "message"), NAMES)
def test_a_format_for_an_unknown_weight_is_refused(kind: Any, x: torch.Tensor, formats: Any, message: str) -> None:
    ir = npu_compiler.capture(kind().eval(), (x,))
    plan = npu_compiler.partition(ir)
    with pytest.raises(ConfigError, match=message):
        npusim.build(kind().eval(), (x,), weights=formats)
    with pytest.raises(ConfigError, match=message):
        npu_compiler.compile_plan(plan, weights=formats)
    if plan.on_npu:
        with pytest.raises(ConfigError, match=message):
            npu_compiler.compile(ir, weights=formats)


@pytest.mark.parametrize("key", ["up.weight", "down.weight"])
def test_a_format_may_concern_one_partition_of_several(key: str) -> None:
    built = npusim.build(OnBoth().eval(), (ROWS,), weights={key: "int8"})
    assert len(built.programs) == 2
    stored = {b.name: b.format for program in built.programs for b in program.buffers if b.kind == "weight"}
    assert {name for name, format in stored.items() if format} == {key}


def test_tensors_that_the_model_does_not_read_are_ignored() -> None:
    model = Tied().eval()
    built = npusim.build(model, (IDS,))
    other = {"embed.weight": torch.ones(64, 64), "rotary.inv_freq": torch.ones(4), "unused.weight": torch.ones(9)}
    built.load_weights(other)
    torch.testing.assert_close(built(IDS), torch.full((2, 5, 64), 64.0))


def test_buffers_start_with_the_contents_of_the_module(tmp_path: Path) -> None:
    model, x = Running().eval(), torch.randn(3, 4)
    built = npusim.build(model, (x,))
    loaded = npu_runtime.load(*built.save(tmp_path / "running"))
    for _ in range(2):
        with torch.no_grad():
            wanted = model(x)
        torch.testing.assert_close(built(x), wanted)
        torch.testing.assert_close(torch.from_numpy(loaded(x.numpy())), wanted)
    state = Running().state_dict() | model.linear.state_dict(prefix="linear.")
    built.load_weights(state)
    loaded.reset()
    torch.testing.assert_close(torch.from_numpy(loaded(x.numpy())), built(x))
    with pytest.raises(WeightError, match="the dict lacks the first contents of buffers that the model writes: 'mean'"):
        built.load_weights({key: t for key, t in state.items() if key != "mean"})


def test_the_contents_of_a_buffer_in_a_damaged_file_are_refused(tmp_path: Path) -> None:
    program = npu_compiler.compile(npu_compiler.capture(Running().eval(), (torch.randn(3, 4),)))
    made = dict(program.recipes.outputs)
    program.recipes.outputs = [("count", made["linear.bias"]) if n == "count" else (n, v) for n, v in made.items()]
    with pytest.raises(ArtifactError, match="the contents of a state are not constant"):
        program.save(tmp_path / "damaged.npubin")
