"""What follows from both: sizes, commands, what is likely to go wrong, each with its reason."""
