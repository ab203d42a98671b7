"""Our runtime and torch's own, side by side in the same processes."""
