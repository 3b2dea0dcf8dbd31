"""Ways to start a run: `python -m launch` in the checkout, `smprun` once installed."""
