"""Engines: what holds the weights and samples tokens. `base.Engine` is the seam, `torch_engine` the first of them."""
