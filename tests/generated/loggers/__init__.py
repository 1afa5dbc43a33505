"""The output and files of loggers, recorded from small trainings, and read back.

`python -m tests.generated.loggers.record` records them again, into `recorded`. Each folder there
has a `truth.json`, which the program's own callback wrote, and the files that its logger left.
"""
