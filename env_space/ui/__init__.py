"""The inspector: a Gradio page over the rollout service's own routes. Only `inspector.py` imports gradio."""
