"""The conformance suite: what a backend declares, proved or refuted.

Needs the `conformance` extra. ``lazykv conformance NAME`` runs it; so does ``python -m pytest -p
lazykv.testing.plugin --pyargs lazykv.testing.suite --lazykv-backend NAME``.
"""
