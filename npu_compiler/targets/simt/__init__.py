"""GPU kernels written once: bodies over a small vocabulary that each GPU target spells in its own language."""
