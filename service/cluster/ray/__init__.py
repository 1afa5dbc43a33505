"""The only code of the service that drives Ray: embedded Ray, the gateway process, the driver."""
