"""The methods of both clients by subject, each blocking class beside its asynchronous twin."""
