"""One step on one rank: bodies, glue, placed modules, transfers, backward passes."""
