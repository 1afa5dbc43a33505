"""The program of a job: a recipe or a script, its model, remote code, its environment."""
