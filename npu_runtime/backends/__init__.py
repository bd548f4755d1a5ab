"""One module per device; the file's name is the backend's name, and its ``BACKEND`` is the class."""
