"""`calib export --format artifact`: writes the part of an artifact that some methods need as a separate artifact."""
