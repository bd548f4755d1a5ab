"""npu_compiler.schedule."""
