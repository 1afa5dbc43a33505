"""Which jobs get which slots: pure rules, of which `policy.plan` is the whole."""
