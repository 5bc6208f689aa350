"""Level `paged`; see `lazykv.testing.levels`."""
