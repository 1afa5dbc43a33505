"""The HTTP layer: parses and authorises a request, calls one function of the service and responds.

This package uses neither SQL nor Ray.
"""
