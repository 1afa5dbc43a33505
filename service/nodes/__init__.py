"""The nodes as the service knows them: their table, quarantine, and what their GPUs can do."""
