"""Routes of the server itself: its cluster, health, web page, and descriptions of its API."""
