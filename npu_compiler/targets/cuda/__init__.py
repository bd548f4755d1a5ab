"""CUDA: the SIMT kernels in CUDA C++, compiled to cubins by NVRTC on any machine."""
