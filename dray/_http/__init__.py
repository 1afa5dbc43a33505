"""The SDK's private HTTP: one transport under two clients, retries, streams and downloads."""
