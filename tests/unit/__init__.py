"""The compiler's modules, in folders like those of npu_compiler."""
