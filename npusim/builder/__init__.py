"""``npusim.build``: from a PyTorch module to a callable ``Model`` with a program for each tuple of input shapes."""
