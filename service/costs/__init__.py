"""The prices file, the costs of attempts, the spending of queues, and cost reports."""
