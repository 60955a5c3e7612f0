"""The rollout service: stages, groups, leases, and what survives a restart."""
