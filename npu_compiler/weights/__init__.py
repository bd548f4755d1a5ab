"""Weights: the files they come from, and the layouts and formats in which kernels read them."""
