"""npu_compiler.ops."""
