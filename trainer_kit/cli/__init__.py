"""The command `trainer-kit`: `main` finds the command, and each command is a file of its own."""
