"""The inference Space: follows a run's weights and answers calls with tokens, logprobs and weight versions."""
