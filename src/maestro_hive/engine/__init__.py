"""How one step is executed: one path for Hive and for the executors."""
