"""Parsers of answers: tool calls and reasoning as chat templates write them, one file per form."""
