"""The PyTorch runtime: exits where the rule says, and only the compute that they need."""
