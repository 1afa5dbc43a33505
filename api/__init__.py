"""The HTTP layer: parses and authorises a request, calls one function of the service and answers.

This package uses neither SQL nor Ray.
"""
