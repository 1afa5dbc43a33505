"""Help for those who write a job document: its schema, a text for each field, a first document."""
