"""Job documents and scripts, each submitted by a test."""
