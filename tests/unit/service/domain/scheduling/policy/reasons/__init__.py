"""The claims of the sentences of a plan, and a slow look at whether they are true."""
