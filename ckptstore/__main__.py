"""``python -m ckptstore`` is the command ``ckptstore``."""

from ckptstore.cli import main

if __name__ == "__main__":
    main()
