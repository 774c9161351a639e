"""The routing service: a request becomes a plan."""
