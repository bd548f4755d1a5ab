"""The public functions that read and write IR JSON, and the types they return."""

from .aten.ir import IRGraph, OpNode, TensorSpec
from .aten.json_reader import load_ir, load_ir_from_dict
from .aten.json_writer import ir_to_dict, save_ir

__all__ = ["IRGraph", "OpNode", "TensorSpec", "ir_to_dict", "load_ir", "load_ir_from_dict", "save_ir"]
