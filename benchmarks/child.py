"""One contender in this process: ``python -m benchmarks.child MODULE NAME prepare|measure FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import registry

if __name__ == "__main__":
    module, name, part, place = sys.argv[1:]
    contender = next(each for each in registry.load(module) if each.name == name)
    if part == "measure":
        print(json.dumps(contender.measure(Path(place))))
    elif contender.prepare is not None:
        contender.prepare(Path(place))
