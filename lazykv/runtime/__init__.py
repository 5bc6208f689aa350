"""Planning with the structural cache, and realizing."""
