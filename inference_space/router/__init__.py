"""One URL in front of several inference Spaces of the same run."""
