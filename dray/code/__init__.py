"""The uploaded code of a job: the selection of files, and the description of an upload."""
