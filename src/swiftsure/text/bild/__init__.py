"""BiLD: a small model drafts, a large model verifies."""
