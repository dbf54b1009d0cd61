"""Server for one machine in the protocols of OpenAI and Anthropic; docs/serving.md."""
