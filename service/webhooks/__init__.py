"""Webhooks: creating and showing them, and sending messages to addresses that users named."""
