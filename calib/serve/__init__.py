"""Plugins for serving engines: one folder for each engine or cache server, based only on `calib.runtime` and shared files here."""
