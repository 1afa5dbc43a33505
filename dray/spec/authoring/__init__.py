"""Help for users who write a job document: its schema, a description of each field, a template."""
