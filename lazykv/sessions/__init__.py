"""Held plans: what a decode loop keeps between tokens."""
