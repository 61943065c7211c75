"""``python -m convert``"""

from convert.cli import main

if __name__ == "__main__":
    main()
