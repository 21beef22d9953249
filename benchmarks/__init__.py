"""Does it really match a tuned learning rate? Tasks | contenders | runner | report; never shipped.

``python -m benchmarks run cpu`` measures, ``python -m benchmarks report`` reads what was measured.
"""
