"""Routes of queues, costs, plans, and what the scheduler decided and expects."""
