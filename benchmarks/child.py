"""One contender in this process: ``python -m benchmarks.child NAME prepare|measure FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import contenders

if __name__ == "__main__":
    name, part, place = sys.argv[1:]
    contender = contenders.find(name)
    if part == "measure":
        print(json.dumps(contender.measure(Path(place))))
    elif contender.prepare is not None:
        contender.prepare(Path(place))
