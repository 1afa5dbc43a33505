"""The chaos runs share the integration tests' embedded service."""

from tests.integration.conftest import client, embedded, script_path

__all__ = ["client", "embedded", "script_path"]
