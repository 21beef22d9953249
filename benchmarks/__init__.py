"""The benchmarks, which are not part of the package: does Mechanic match a tuned learning rate?

``python -m benchmarks run cpu`` measures, ``python -m benchmarks report`` reads what was measured.

- ``data``: the datasets, from a local folder or from their public sources.
- ``suite``: tasks, contenders, the training loop, the plan of runs, and their records.
- ``contest``: one point of every method, searched on some tasks and judged on others.
- ``report``: tables and figures from the records.
- ``speed``: what a step costs.
"""
