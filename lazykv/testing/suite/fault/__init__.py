"""Level `fault`; see `lazykv.testing.levels`."""
