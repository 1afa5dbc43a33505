"""The HTTP edge: it parses a request, authorises it, calls one function of the service and answers.

It contains no SQL and no Ray.
"""
