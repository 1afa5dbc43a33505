"""The SDK's private HTTP layer: the transport of both clients, retries, streams and downloads."""
