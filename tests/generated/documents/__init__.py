"""Drawn job documents, from the request to the launch of their ranks on a cluster in memory.

`drawing.py` draws from the JSON schema. `way.py` follows one document; `fields.py` looks for the
readers of each field.
"""
