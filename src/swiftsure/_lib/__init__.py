"""Helpers that every room shares: argument checks, files, registries, compiled loops."""
