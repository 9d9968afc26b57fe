"""Block drafters: architecture, layout of a block, warm start, checkpoints."""
