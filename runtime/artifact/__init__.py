"""The artifact: the results of `calib fit` in one file, and the checks that are made before any of it is used."""
