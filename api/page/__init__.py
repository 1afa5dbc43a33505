"""The web page: static files, and the code that serves them. The page uses only the public API."""
