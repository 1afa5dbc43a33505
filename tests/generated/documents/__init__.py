"""Generated job documents, followed from the request to the launch on a cluster in memory.

`drawing.py` generates documents from the JSON schema. `way.py` follows one document. `fields.py`
and `readers.py` find the code that reads each field.
"""
