"""Storage on host and device: every token exact on the host, and on the device a store that finds those worth fetching."""
