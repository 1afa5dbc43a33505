# Written by `make blocking` from dray/_async/__init__.py: change that file instead.
"""The methods of the blocking client, grouped by subject."""
