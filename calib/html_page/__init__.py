"""Shared parts of our HTML pages: each is one file for any screen size, light or dark, that loads nothing over the network."""
