"""npu_compiler.support."""
