"""`calib fit --plan`: what a fit captures, holds, writes and takes, told from a configuration before any weight is loaded."""
