"""What loggers print and write, recorded from small trainings, and read back.

`python -m tests.generated.loggers.record` records anew, into `recorded`. Each folder in there has a
`truth.json`, which the program's own callback wrote, and what its logger left.
"""
