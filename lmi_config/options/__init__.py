"""What was asked for: options, declared once, and what is read of them."""
