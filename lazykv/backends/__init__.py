"""Backends: a class in a file each, its kernels beside it. Nothing is imported until a location of
that kind is used."""
