"""Access, quotas and backups of the files under the storage URL."""
