"""Speed and memory of training: `python -m benchmarks.NAME` (README.md here)."""
