"""The lease service: attached engines, what they hold, and the relay between them."""
