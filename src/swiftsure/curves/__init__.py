"""Losses and costs of samples along a path of settings; risks, paths and dials."""
