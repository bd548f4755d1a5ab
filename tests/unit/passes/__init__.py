"""npu_compiler.passes."""
