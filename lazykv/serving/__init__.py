"""Serving many requests at once over a paged pool."""
