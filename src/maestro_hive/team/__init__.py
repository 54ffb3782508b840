"""Teams: a feature as a graph of tasks, in dependency levels, executed by concurrent workers."""
