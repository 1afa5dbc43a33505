"""The access log and the Prometheus metrics of the server."""
