"""Training again from what a run recorded."""
