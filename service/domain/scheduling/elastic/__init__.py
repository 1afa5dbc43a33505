"""The sizes of elastic jobs."""
