"""The benchmark: what a policy costs and what it saves, in time and memory, on one machine in one run."""
