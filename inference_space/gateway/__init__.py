"""Captured conversations: what agent programs say in their own dialects, as token chains of the engine."""
