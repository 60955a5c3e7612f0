"""OpenEnv 0.10 both ways: our environments for its clients, and its servers as our environments."""
