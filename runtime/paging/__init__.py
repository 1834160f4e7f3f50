"""Pages of encoded tokens and the exact window: how many tokens each row holds, and in which slots."""
