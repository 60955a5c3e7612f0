"""Environments and the rollout service. Imports `sync` only; no torch and no transformers."""
