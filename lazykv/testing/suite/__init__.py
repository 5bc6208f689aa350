"""The tests of the conformance suite, a folder per level. Run them as `lazykv.testing` says."""
