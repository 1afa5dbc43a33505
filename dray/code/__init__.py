"""The uploaded code of a job: which files are uploaded, and the description of an upload."""
