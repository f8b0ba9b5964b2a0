"""CALM: early-exit generation with a Hugging Face model."""
