"""Help for writing a job document: its schema, a description of each field, and templates."""
