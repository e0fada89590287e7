"""Measured runs and their steps."""
