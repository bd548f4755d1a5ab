"""Where kernels come from in the model's code: from torch.export through IR, fusion and artifact."""

from __future__ import annotations

import inspect

import pytest
import torch

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.artifact.serialize import dumps
from npu_compiler.aten.ir import IRGraph, Location
from npu_compiler.aten.json_reader import load_ir_from_dict
from npu_compiler.aten.json_writer import ir_to_dict
from npu_compiler.frontend import capture
from npu_compiler.pipeline import compile_ir
from npu_compiler.support.errors import ArtifactError, IRError


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)
        self.cell = torch.nn.GRUCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.fc(x))
        return self.cell(y, x)


LINE = inspect.getsourcelines(Block.forward)[1]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


@pytest.fixture(scope="module")
def ir() -> IRGraph:
    return capture(Net(), (torch.zeros(2, 8),))


@pytest.fixture(scope="module")
def program(ir: IRGraph) -> CompiledProgram:
    return compile_ir(ir)


def test_nodes_have_the_module_and_line_of_the_model(ir: IRGraph) -> None:
    linear = next(n for n in ir.nodes if n.op_type.startswith("aten.linear"))
    assert linear.location is not None
    assert (linear.location.module, linear.location.kind) == ("blocks.0.fc", "Linear")
    assert linear.location.source.endswith(f"test_locations.py:{LINE + 1}")
    assert not linear.location.source.startswith("/")  # reports must not tell paths of this machine


def test_what_a_decomposition_makes_stays_where_it_was_called(ir: IRGraph) -> None:
    cell = [n for n in ir.nodes if n.location is not None and n.location.module == "blocks.0.cell"]
    assert len(cell) > 3 and not any("gru" in n.op_type for n in ir.nodes)
    assert {n.location.source.rpartition(":")[2] for n in cell if n.location} == {str(LINE + 2)}


def test_a_fused_kernel_lists_all_of_its_modules(program: CompiledProgram) -> None:
    calls = program.entries["main"].calls
    first = [program.locations[n] for c in calls if "relu" in c.sources for n in c.locations]
    assert {place.module for place in first} == {"blocks.0.fc", "blocks.0"}
    assert CompiledProgram.loads(dumps(program)).locations == program.locations


def test_the_code_of_a_program_does_not_depend_on_locations(ir: IRGraph, program: CompiledProgram) -> None:
    document = ir_to_dict(ir)
    assert load_ir_from_dict(document).nodes == ir.nodes
    for node in document["nodes"]:
        node.pop("location", None)  # as in files of other writers
    plain = compile_ir(load_ir_from_dict(document))
    assert plain.locations == [] and all(c.locations == () for c in plain.entries["main"].calls)
    assert (plain.binary, plain.sources) == (program.binary, program.sources)


def test_damaged_locations_are_refused(ir: IRGraph, program: CompiledProgram) -> None:
    document = ir_to_dict(ir)
    document["nodes"][0]["location"] = {"module": 3}
    with pytest.raises(IRError, match=r"nodes\[0\].location.module"):
        load_ir_from_dict(document)
    broken = CompiledProgram.loads(dumps(program))
    broken.locations = [Location("a")]
    with pytest.raises(ArtifactError, match=r"entries\[0\].calls\[\d\].locations: there are 1 locations"):
        dumps(broken)
