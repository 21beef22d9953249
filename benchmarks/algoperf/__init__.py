"""Our AlgoPerf submission on two small workloads, behind the interface that AlgoPerf has for its own."""
