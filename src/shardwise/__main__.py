"""`python -m shardwise`."""

from shardwise.cli import main

main()
