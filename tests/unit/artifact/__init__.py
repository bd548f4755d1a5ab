"""npu_compiler.artifact."""
