"""The use cases behind the API: submit, cancel, list, read and test a job."""
