"""What to expect: repeated splits, sample sizes, simulated networks."""
