"""What calls our AlgoPerf submission as AlgoPerf does, on a small workload, for its tests."""
