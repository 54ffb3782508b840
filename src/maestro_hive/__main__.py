"""``python -m maestro_hive`` is ``maestro``."""

from maestro_hive.cli import main

if __name__ == "__main__":
    main()
