"""The suite of tasks and contenders: what runs, in which order, and the records of it."""
