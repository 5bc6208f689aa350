"""Level `interop`; see `lazykv.testing.levels`."""
