"""All SQL of the service: functions that take a Session, with one module per group of tables.

They contain no rules: callers decide what can change and when.
"""
