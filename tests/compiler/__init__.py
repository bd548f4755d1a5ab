"""Tests of the compiler itself: lowering, passes, scheduling, memory."""
