"""The inference Space: follows a run's weights, answers calls with tokens, logprobs and versions."""
