"""What the three servicers share: callers, errors, pages, the server."""
