"""Trained networks, records and images for Swiftsure, read through `swiftsure.assets`."""

__version__ = "0.1.0"
