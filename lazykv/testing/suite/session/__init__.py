"""Level `session`; see `lazykv.testing.levels`."""
