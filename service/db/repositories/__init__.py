"""All SQL of the service: one module for each group of tables, functions that take a Session.

They know nothing of rules; what may be changed when is decided by those who call them.
"""
