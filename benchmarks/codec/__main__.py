"""`python -m benchmarks.codec codec`, as `deltawire bench codec`."""

from __future__ import annotations

import argparse
import sys

from . import cli

parser = argparse.ArgumentParser(prog="python -m benchmarks.codec", description=cli.__doc__)
cli.add_arguments(parser)
sys.exit(cli.run(parser.parse_args()))
