"""HTTP helpers that routes share: bodies, ranges, caching, downloads, connections."""
