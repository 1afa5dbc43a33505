"""The only code of the service that uses Ray: the embedded Ray, the gateway process, and the
driver."""
