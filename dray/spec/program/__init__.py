"""What a job runs: a recipe or a script, the model, code from elsewhere, and the environment."""
