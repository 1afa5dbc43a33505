"""The program of a job: a recipe or script, with its model, remote code and environment."""
