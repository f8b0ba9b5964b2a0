"""What is promised: controls, bounds, policies and their certificates."""
