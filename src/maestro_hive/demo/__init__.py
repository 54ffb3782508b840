"""The demonstration: a team of scripted personas, killed half-way, and the proof of what was done."""
