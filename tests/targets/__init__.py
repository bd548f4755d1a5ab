"""Code generators: kernels against references."""
