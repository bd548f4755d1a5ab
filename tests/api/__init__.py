"""npusim.build and what it returns."""
