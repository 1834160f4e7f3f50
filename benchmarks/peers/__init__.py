"""Other libraries' methods on this project's cases, each in an environment of its own; nothing here imports the project."""
