"""`python -m onefold.cli` is the command `onefold`."""

from onefold.cli import main

main()
