"""The twin test: generated workflows, run undisturbed and next to that killed and resumed.

``programs`` generates them, ``program`` executes them in real processes, ``comparison`` compares.
``python -m faults.twin`` runs some; ``--replay SPEC.json`` runs one again.
"""
