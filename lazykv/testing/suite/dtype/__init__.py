"""Level `dtype`; see `lazykv.testing.levels`."""
