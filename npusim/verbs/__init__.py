"""The verbs of the ``npusim`` command, one file each: ``run(args, status)`` does the work and returns a ``Result``."""
