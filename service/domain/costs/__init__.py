"""The price of slots, the cost of attempts, and the budgets of queues. No I/O."""
