"""Texts for fits and evaluations: generated documents with questions, running text, and the split into train and eval."""
