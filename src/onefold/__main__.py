"""`python -m onefold` is the command `onefold` (for launchers that start a module:
`torchrun -m onefold train`).
"""

from onefold.cli import main

if __name__ == "__main__":
    main()
