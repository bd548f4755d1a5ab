"""Storage formats of weights."""
