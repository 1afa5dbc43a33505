"""Costs: the file of prices, the costs of attempts, the spending of queues, and reports."""
