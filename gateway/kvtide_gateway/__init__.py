"""kvtide's OpenAI-compatible HTTP gateway."""
