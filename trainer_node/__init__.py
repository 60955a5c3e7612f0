"""The trainer node: leases rollouts, trains with TRL, publishes weights and curriculum. Imports `sync` only."""
