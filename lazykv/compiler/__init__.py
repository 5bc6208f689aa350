"""From a graph to a plan: trace, placement, rewrite, effects, ordering, memory, program."""
