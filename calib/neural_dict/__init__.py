"""NeuralDict: dictionaries of unit atoms for sparse keys and values, trained on captured vectors (CSR, arXiv:2412.11741)."""
