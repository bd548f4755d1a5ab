"""The verbs of the ``npusim`` command, one file each: ``run(args)`` does the work and returns a ``Result``."""
