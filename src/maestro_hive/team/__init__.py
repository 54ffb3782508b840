"""Teams: a feature as tasks in dependency levels, executed by concurrent workers."""
