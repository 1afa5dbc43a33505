"""All SQL of the service: one module for each group of tables, functions that take a Session.

They contain no rules: callers decide what may change and when.
"""
