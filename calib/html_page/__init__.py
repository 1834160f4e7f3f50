"""What every page we write shares: one HTML file for any screen, light or dark, that asks the network for nothing."""
