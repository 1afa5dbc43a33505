"""The claims of the sentences of a plan, and slow checks of whether they are true."""
