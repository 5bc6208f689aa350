"""Ops, one family a module; see `lazykv.ops.op` for what an op declares."""
