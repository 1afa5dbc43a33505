"""Drawn files: tables, arrays, images, folders, archives and texts.

Each module draws files of one kind together with what they hold. `cases.py` has what all kinds
share, and `test_files.py` compares what dray reads with it.
"""
