"""A Hub on your own machine: buckets, repositories and Spaces for unmodified Hugging Face clients, without a network.

Started with `deltawire hub serve --data DIR`; clients need only `HF_ENDPOINT` (and `HF_TOKEN`, where tokens are set).
Needs the extra `hub`; nothing outside this package imports it.
"""
