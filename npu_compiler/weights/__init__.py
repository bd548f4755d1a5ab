"""Weights: their files, and the layouts and formats in which kernels read them."""
