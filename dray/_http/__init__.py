"""How the SDK speaks HTTP: one transport under two clients, retries, streams and downloads."""
