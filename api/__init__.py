"""The HTTP layer: parses and authorises a request, calls one function of the service and answers.

It contains no SQL and no Ray.
"""
