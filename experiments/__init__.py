"""Measurements: `python -m experiments table --config configs/demo_smollm2.yaml` prints a speed table."""
