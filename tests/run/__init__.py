"""What all systems under a policy share."""
