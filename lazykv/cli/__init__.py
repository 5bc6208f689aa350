"""The `lazykv` command."""

from lazykv.cli.entry import main as main
