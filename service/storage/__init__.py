"""Files under the storage URL: access, quotas and backup."""
