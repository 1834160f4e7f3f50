"""Which layers share a dictionary: how far apart two layers' vectors lie, and the groups that follow from it."""
