"""Webhooks: managing them, and sending messages to addresses that users have named."""
