"""The channel's command line: look at a run in a bucket, check it, take versions out of it, clean it up."""
