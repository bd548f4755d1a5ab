"""The core graph: values, scalar expressions, what every primitive means in numpy, and the invariants of a graph."""
