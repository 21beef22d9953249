"""The failure matrix: what optimizers do in situations that go wrong in real training.

``python -m benchmarks.failures run`` runs every cell and writes records, ``... page`` makes docs/failures.md of them.
"""
