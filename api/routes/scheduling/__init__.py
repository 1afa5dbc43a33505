"""Routes of queues, costs and plans, and of the decisions and forecasts of the scheduler."""
