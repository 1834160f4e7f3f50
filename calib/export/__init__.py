"""What other programs read, made from an artifact: one folder a format, each with a `command.run(argv) -> int`."""
