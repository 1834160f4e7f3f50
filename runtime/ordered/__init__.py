"""Storage in order: a token lies where it stands in its row."""
