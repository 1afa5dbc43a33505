"""The web page: static files, and the code that serves them. It uses the public API alone."""
