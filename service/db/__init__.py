"""Tables, migrations and sessions. All SQL is in `service.db.repositories`."""
