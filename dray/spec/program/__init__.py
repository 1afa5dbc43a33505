"""The program of a job: a recipe or a script, its model, code from elsewhere, its environment."""
