"""Metadata of the paged pool: which block holds which tokens. Integers only, no bytes."""
