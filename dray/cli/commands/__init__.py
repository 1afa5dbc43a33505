"""The commands, by subject. Importing a module registers its commands."""
