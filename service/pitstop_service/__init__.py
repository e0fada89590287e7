"""Pitstop's service: predictions and measured runs over HTTP, kept in SQLite or PostgreSQL."""
