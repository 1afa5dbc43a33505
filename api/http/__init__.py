"""Helpers of HTTP that several routes share: bodies, ranges, caching, downloads, connections."""
