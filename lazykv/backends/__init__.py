"""Backends, one a file. Nothing is imported until a location of that kind is used."""
