"""What every level of the package may use."""
