"""Engines hold the weights and sample tokens. `base.Engine` is the seam, `torch_engine` the first of them."""
