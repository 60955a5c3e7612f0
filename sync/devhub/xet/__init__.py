"""The content-addressed store behind the Hub: what hf_xet uploads to and downloads from."""
