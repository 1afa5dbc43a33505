"""The use cases of the API: submit, cancel, list, read and test jobs."""
