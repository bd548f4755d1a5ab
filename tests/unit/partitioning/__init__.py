"""npu_compiler.partitioning."""
