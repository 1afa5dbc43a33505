"""Costs: the file of prices, what attempts cost, what queues have spent, and reports of it."""
