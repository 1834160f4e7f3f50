"""Exports from an artifact for other programs: one package for each format, with `command.run(argv) -> int`."""
