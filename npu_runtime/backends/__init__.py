"""One module or package per backend, of the backend's name; its ``BACKEND`` is the class."""
