"""What serving engines load: one folder an engine or a cache server, each on `calib.runtime` alone."""
