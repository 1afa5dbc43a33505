"""The calls of OpenAI's API for files, fine-tuning jobs and models."""
