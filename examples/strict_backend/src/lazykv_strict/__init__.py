"""A lazykv backend on array-api-strict."""

from lazykv_strict.backend import StrictBackend

__all__ = ["StrictBackend"]
