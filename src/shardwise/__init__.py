"""shardwise plans, proves and runs the parallel training of large language models."""
