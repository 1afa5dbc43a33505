"""Webhooks: making and showing them, and sending a message to an address that somebody named."""
