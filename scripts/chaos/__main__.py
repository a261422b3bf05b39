"""`python -m scripts.chaos`: faults under load."""

from scripts.chaos.world import main

main()
