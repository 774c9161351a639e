"""The session service: records with a lease that clients renew."""
