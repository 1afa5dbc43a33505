"""Routes of the server itself: cluster, health, web page, and descriptions of the API."""
