"""What there is: the machine, the model, its draft, adapters."""
