"""dray: submit distributed training jobs over HTTP and read them back.

The package holds what a user's machine needs and nothing heavier: the job document
(`dray.spec`), what the API answers (`dray.views`), the HTTP clients (`dray.Client`,
`dray.AsyncClient`), the command line, and `dray.train`, which a training script imports.
"""

__version__ = "0.1.0"
