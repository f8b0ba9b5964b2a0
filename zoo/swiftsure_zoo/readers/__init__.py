"""Readers for datasets in their published layouts."""
