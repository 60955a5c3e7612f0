"""Hostile payloads: samples of every kind, mutated by structure, judged by a reader that shares no code with the codec.

`PYTHONPATH=tests python -m fuzz.run --seconds 60` (see `run.py`). `container.py` takes payloads apart, `outer.py` and
`inner.py` mutate them, `oracle.py` reads them in plain Python, `judge.py` compares.
"""
