"""Predictions: ask for one, look one up."""
