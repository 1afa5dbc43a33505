"""All SQL of the service: functions that take a Session, with one module per group of tables.

The functions contain no rules: callers decide what can change, and when.
"""
