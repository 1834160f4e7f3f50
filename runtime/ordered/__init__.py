"""Storage in order: a token's slot follows from its position in the row."""
