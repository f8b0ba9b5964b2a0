"""Calibration on samples that arrive over time, valid at every moment."""
