"""What is promised, and tests that would notice if it were not kept."""
