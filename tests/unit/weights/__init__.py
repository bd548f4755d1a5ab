"""npu_compiler.weights."""
