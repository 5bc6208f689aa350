"""Level `core`; see `lazykv.testing.levels`."""
