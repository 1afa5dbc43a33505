"""Pure rules that decide which jobs get which slots. `policy.plan` applies all of them."""
