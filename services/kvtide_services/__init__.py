"""kvtide's session, lease and routing services over Redis or Valkey."""
