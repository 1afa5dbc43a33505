"""Generated files: tables, arrays, images, folders, archives and texts.

Each module generates files of one kind together with their expected contents. `cases.py` has the
code shared by all kinds, and `test_files.py` compares the contents with what dray reads.
"""
