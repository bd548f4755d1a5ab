"""What the project's descriptions promise, as a reader would type it: one test for each promise.

The files follow the descriptions: quick start, compiler, partitions, runtime, porting, models, command line, names.
``test_row_NNN_…`` are promises that an audit once found broken; their numbers are those of the audit. Where the project
differs by design, the test asserts that the table of docs/names.md says so and that what it points to exists.
"""
