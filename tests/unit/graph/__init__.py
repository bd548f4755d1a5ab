"""npu_compiler.graph."""
