"""The HTTP edge: parse, authorise, call one function of the service, answer. No SQL and no Ray."""
