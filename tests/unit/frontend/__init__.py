"""npu_compiler.frontend."""
