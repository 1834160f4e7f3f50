"""`calib export --format artifact`: the part of an artifact that some methods need, as a file of its own."""
