"""Parallelism for any `nn.Module`, a piece at a time, inside a process group that is already open."""
