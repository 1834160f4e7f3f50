"""Converts checkpoints that transformers has no code for, or loads slowly, into folders that calib can fit."""
