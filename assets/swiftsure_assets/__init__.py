"""Trained networks, records and images for Swiftsure, read through `swiftsure.assets`."""
