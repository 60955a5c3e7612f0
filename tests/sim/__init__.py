"""A deterministic simulation of a whole run: real publishers and followers, a store that misbehaves, one seed."""
