"""What a delta costs in bytes, time and memory: our codecs, other layouts and the entropy bound, on real training.

`deltawire bench codec` runs all of it (`cli.py`). `capture.py` trains and writes pairs of states, `states.py` finds and
reads them, `measure.py`, `speed.py` and `memory.py` measure, `report.py` holds the bars, `plots.py` draws.
"""
