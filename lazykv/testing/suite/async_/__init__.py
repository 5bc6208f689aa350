"""Level `async`; see `lazykv.testing.levels`."""
