"""Every op of the registry against PyTorch, on every target."""
