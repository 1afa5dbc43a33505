"""How much of the time a job trains though its ranks are killed again and again."""
