"""The ATen-level IR: its types, its JSON form, and what PyTorch's calling conventions mean for it."""
