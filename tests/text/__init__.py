"""Generation: exits where the rule says, caches complete, records that tell the truth."""
