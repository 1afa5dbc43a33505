"""Webhooks: managing webhooks, and sending messages to the addresses that users have specified."""
