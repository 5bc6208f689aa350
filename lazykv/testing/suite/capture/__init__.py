"""Level `capture`; see `lazykv.testing.levels`."""
