"""Teams: a feature as tasks in dependency levels, done by workers at the same time."""
