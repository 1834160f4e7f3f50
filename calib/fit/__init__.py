"""`calib fit`: capture and calibrators put together, stage by stage, into one artifact."""
